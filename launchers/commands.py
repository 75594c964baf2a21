"""`legorl train`: compose, check, prepare, launch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import multiprocessing
import platform
import secrets
import signal
import sys
import tempfile
import time
import traceback
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import legorl
from legorl.errors import InfrastructureError, LegoError, UserError
from legorl.sandbox.linux import set_parent_death_signal

if TYPE_CHECKING:  # Hydra and MLflow are imported when a run starts, not for `--help`
    from multiprocessing.connection import Connection

    from legorl.config.compose import Composed
    from legorl.config.schema import Config

_PREPARE_END_S = 5.0
"""An interrupted preparation gets this long to clean up."""

_VERSIONS = ("verl", "vllm", "torch", "transformers", "ray", "mlflow", "hydra-core")


class Launcher(Protocol):
    """A module of this package."""

    def check_host(self) -> None:
        """Raises `UserError` for what the machine lacks."""

    def launch(self, run_dir: Path) -> int:
        """Run the job to its end; 0 finished, 1 failed, 130 killed."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `train`."""
    parser = subparsers.add_parser(
        "train",
        help="run an experiment",
        description="Compose a configuration, prepare what it needs, and run it.",
        epilog="examples:\n"
        "  legorl train harness=claude_code run.steps=12\n"
        "  legorl train -m algo=gspo,grpo seed=0,1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="group=choice or group.key=value; --cfg shows all keys")
    parser.add_argument("-m", "--multirun", action="store_true", help="run every combination of `key=a,b`")
    parser.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        default=[],
        help="directory with files GROUP/CHOICE.yaml of your own",
    )
    parser.add_argument("--cfg", action="store_true", help="print the composed tree and stop")


def run(args: argparse.Namespace) -> int:
    """Runs one job, or those of a sweep one after another; the first exit code that is not 0 counts."""
    from legorl.config.compose import compose_run, expand_sweep
    from legorl.config.resolved import to_yaml

    wanted = expand_sweep(args.overrides, args.config_dir) if args.multirun else [args.overrides]
    jobs = [
        compose_run(overrides, args.config_dir) for overrides in wanted
    ]  # all are checked before one runs
    if args.cfg:
        print("---\n".join(to_yaml(job.config) for job in jobs), end="")
        return 0
    launchers = {job.config.launcher.name: _launcher(job.config.launcher.name) for job in jobs}
    for launcher in launchers.values():
        launcher.check_host()
    for job in jobs:
        _check_paths(job.config)
    sweep = secrets.token_hex(4) if args.multirun else ""
    codes = []
    for number, job in enumerate(jobs, 1):
        if args.multirun:
            print(f"[{number}/{len(jobs)}] {' '.join(job.overrides)}", flush=True)
        codes.append(_run_one(job, launchers[job.config.launcher.name], sweep))
        if codes[-1] == 130:
            break
    return next((code for code in codes if code), 0)


def _check_paths(config: Config) -> None:
    """The directories of `paths` can be used, and that of the runs be written; caches may be read-only.

    Raises:
        UserError: names the key.
    """
    for key, value in dataclasses.asdict(config.paths).items():
        try:
            Path(value).mkdir(parents=True, exist_ok=True)
            if key == "runs":
                with tempfile.TemporaryFile(dir=value):
                    pass
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise UserError(
                f"paths.{key}={value} is no directory to work in: {error.strerror}. Choose another path."
            ) from error


def _run_one(job: Composed, launcher: Launcher, sweep: str) -> int:
    from legorl.config import rundir
    from legorl.config.resolved import config_hash, save_config
    from legorl.tracking import mlflow

    config = job.config
    run_dir = rundir.new_run_dir(Path(config.paths.runs))
    with rundir.lock(run_dir):
        info = rundir.RunInfo(
            id=run_dir.name,
            steps=config.run.steps,
            created=time.time(),
            name=config.run.name,
            command=["legorl", *sys.argv[1:]],
            overrides=list(job.overrides),
            choices=job.choices,
            config_hash=config_hash(config),
            versions=_versions(),
            sweep=sweep,
        )
        rundir.write_info(run_dir, info)
        save_config(config, run_dir)
        print(f"run {info.id} ({_choices(job)})", flush=True)
        try:
            mlflow.create_store(config)
            info = dataclasses.replace(info, mlflow_run=mlflow.create_run(config, info))
            rundir.write_info(run_dir, info)
            _prepare(config)
        except BaseException as error:
            state = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
            reason = "interrupted" if state == "killed" else str(error) or type(error).__name__
            rundir.end_run(run_dir, state, f"while preparing: {reason}")
            if info.mlflow_run:
                with contextlib.suppress(LegoError):  # the first error is the one to tell
                    mlflow.end_if_running(config, info.mlflow_run, state)
            raise
        code = launcher.launch(run_dir)
    print(f"look:   legorl show {info.id}")
    print(f"curves: mlflow ui --backend-store-uri {_short(mlflow.tracking_uri(config))}", flush=True)
    return code


def _prepare(config: Config) -> None:
    """Tasks, harness runtime and start policy, each built when it is missing.

    In a process of its own: the supervisor stays for the whole run and should not hold torch in memory.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_prepare_and_tell, args=(config, sender))
    process.start()
    sender.close()
    try:
        error = receiver.recv()
    except EOFError:
        process.join(10)
        raise InfrastructureError(f"The preparation died (exit code {process.exitcode}).") from None
    except KeyboardInterrupt:
        process.terminate()  # it takes away what it left half done
        raise
    finally:
        process.join(_PREPARE_END_S)
        process.kill()
        process.join(10)
    if error is not None:
        raise error


def _prepare_and_tell(config: Config, sender: Connection) -> None:
    """In the child: prepare, then send the error or None."""
    set_parent_death_signal(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt_once)
    from legorl.trainer.prepare import prepare

    try:
        prepare(config, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        pass
    except (LegoError, OSError) as error:
        sender.send(error)
    except Exception as error:  # not sent itself: not every exception survives pickling
        traceback.print_exc()
        sender.send(InfrastructureError(f"The preparation failed: {type(error).__name__}: {error}"))
    else:
        sender.send(None)


def _interrupt_once(number: int, frame: object) -> None:
    """A Ctrl-C comes from the terminal and from the parent: the second must not end the cleaning."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def _launcher(name: str) -> Launcher:
    try:
        module = import_module(f"legorl.launchers.{name}")
    except ModuleNotFoundError as error:
        raise UserError(f"launcher.name={name}: there is no module legorl.launchers.{name}.") from error
    if not hasattr(module, "launch"):
        raise UserError(f"launcher.name={name}: legorl.launchers.{name} is no launcher.")
    return cast(Launcher, module)


def _versions() -> dict[str, str]:
    found = {"legorl": legorl.__version__, "python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _choices(job: Composed) -> str:
    return " ".join(f"{group}={job.choices[group]}" for group in ("harness", "model", "algo", "experiment"))


def _short(uri: str) -> str:
    """A database below the working directory by its relative path."""
    prefix = "sqlite:///"
    path = Path(uri.removeprefix(prefix))
    if uri.startswith(prefix) and path.is_relative_to(Path.cwd()):
        return f"{prefix}{path.relative_to(Path.cwd())}"
    return uri
