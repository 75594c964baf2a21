"""The job: trains one run from its directory. `python -m legorl.trainer.job RUN_DIR`.

Invariant: it reads nothing but RUN_DIR/config.yaml and what that names; its exit status is 0 only if the
last step was done, and otherwise a `fatal` event says why; it is 3 where the infrastructure was down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from legorl.config.resolved import load_config
from legorl.config.schema import Config
from legorl.errors import OutageError
from legorl.tracking.events import End, EventLog, Fatal, Phase, read_events
from legorl.trainer import environment

OUTAGE = 3
"""Exit status of a job that ended because too much of the infrastructure failed."""
_MOUNT = Path("/tmp/legorl-ray")
"""Ray's socket paths must stay under 107 characters, so its directory cannot be in the run's."""


@contextlib.contextmanager
def _ray_directory(private_mounts: bool) -> Iterator[Path]:
    """A short directory that leaves nothing behind: in a private mount namespace a tmpfs dies with it."""
    if private_mounts:
        _MOUNT.mkdir(mode=0o700, exist_ok=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(_MOUNT)],
            capture_output=True,
            timeout=10,
            check=False,
        )
        if mounted.returncode == 0:
            yield _MOUNT
            return
    directory = Path(tempfile.mkdtemp(prefix="legorl-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _innermost(error: BaseException) -> BaseException:
    """The error itself; Ray wraps it in the remote traceback."""
    cause = getattr(error, "cause", None)
    return _innermost(cause) if isinstance(cause, BaseException) else error


def _reason(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    return last if type(error).__name__ in last else f"{type(error).__name__}: {last}"


def _last_words(ray_dir: Path, lines: int = 20) -> str:
    """The ends of Ray's own logs; the files are gone with its directory."""
    words = []
    for name in ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err"):
        file = ray_dir / "session_latest" / "logs" / name
        if file.is_file() and (text := file.read_text(errors="replace").splitlines()):
            words += [f"--- {name}", *text[-lines:]]
    return "\n".join(words)


def _train(config: Config, run_dir: Path, events: EventLog, ray_dir: Path) -> None:
    started = time.monotonic()
    from legorl.trainer.warm import WarmWorkers
    from legorl.trainer.watchdog import Watchdog

    warm = WarmWorkers(ray_dir) if config.launcher.warm_workers and config.backend.device == "cpu" else None

    def die(reason: str) -> NoReturn:
        events.write(Fatal(reason))
        print(reason, _last_words(ray_dir), sep="\n", file=sys.stderr, flush=True)
        os._exit(1)

    watchdog = None
    try:
        import ray
        from verl.trainer.main_ppo import run_ppo

        from legorl.trainer import verl_config
        from legorl.trainer.inputs import write_inputs
        from legorl.trainer.task_runner import TaskRunner

        policy = write_inputs(config, run_dir)
        if warm is not None:
            warm.wait()
        tree = verl_config.build(config, run_dir, policy, ray_dir, warm.python if warm else None)
        events.write(Phase("imports", time.monotonic() - started))
        watchdog = Watchdog(die)
        run_ppo(tree, task_runner_class=ray.remote(TaskRunner))
    finally:
        if watchdog is not None:
            watchdog.stop()
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        if warm is not None:
            warm.stop()


def main(arguments: list[str]) -> int:
    """Exit status 0 when trained to the end, 1 or 3 otherwise."""
    run_dir = Path(arguments[0]).resolve()
    config = load_config(run_dir)
    environment.set_up(config)
    events = EventLog(run_dir)
    try:
        with _ray_directory(private_mounts="--private-mounts" in arguments) as ray_dir:
            _train(config, run_dir, events, ray_dir)
    except BaseException as error:
        traceback.print_exc()
        if not any(event["kind"] == Fatal.kind for event in read_events(run_dir)):  # the first cause counts
            events.write(Fatal(_reason(_innermost(error))))
        return OUTAGE if isinstance(_innermost(error), OutageError) else 1
    events.write(End(step=config.run.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
