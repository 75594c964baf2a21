"""`legorl <command>`: finds the command's room, and turns errors into one paragraph and an exit code.

Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's, 3 infrastructure, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from legorl import __version__
from legorl.errors import InfrastructureError, LegoError

COMMANDS = {
    "train": ("legorl.launchers.commands", "run an experiment, or a sweep of them"),
    "status": ("legorl.tracking.commands", "list runs"),
    "show": ("legorl.tracking.commands", "curves, terminations and example trials of a run"),
    "audit": ("legorl.tracking.commands", "who tried what the integrity policy stops, with examples"),
    "tasks": ("legorl.tasks.commands", "make, list and validate task pools"),
    "harness": ("legorl.harness.commands", "install and list agent programs"),
    "sandbox": ("legorl.sandbox.commands", "check the sandbox on this machine"),
    "trial": ("legorl.trial.commands", "run one trial, or look into one"),
}
"""Command -> module with `add_parser` and `run`, and a line of help. Only the one asked for is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", HARBOR_TELEMETRY="0")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no arrows here, a name not in UTF-8
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except InfrastructureError as error:
        return _fail(f"{error} [{error.cause}]", 3)
    except LegoError as error:
        return _fail(str(error), 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of a pipe left: nothing more to say
        return 0
    except OSError as error:
        return _fail(*_from_system(error))
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # from pathlib
            return _fail(f"{error}. Choose another path, or mend the link.", 2)
        traceback.print_exc()
        return _fail(f"this is a fault of legorl's own ({type(error).__name__}); please report the above.", 3)


def _from_system(error: OSError) -> tuple[str, int]:
    """Message and exit code of what the operating system refused: of a file it is the user's to mend."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"The disk is full{where}. Free some space and start again; old runs lie in runs/.", 2
    if error.filename is None:
        return f"The system refused something: {error}.", 3
    return f"{os.fsdecode(error.filename)}: {error.strerror}. Check this path, and who may use it.", 2


def _dispatch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="legorl", description="Reinforcement learning of coding agents.")
    parser.add_argument("--version", action="version", version=f"legorl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    if wanted not in COMMANDS:
        for name, (_, text) in COMMANDS.items():
            subparsers.add_parser(name, help=text)
        parser.parse_args(argv)  # prints help, the version or what is wrong
        return 2
    module = import_module(COMMANDS[wanted][0])
    module.add_parser(subparsers)
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest  # overrides may stand on both sides of an option
    return int(module.run(args))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    print(f"legorl: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
