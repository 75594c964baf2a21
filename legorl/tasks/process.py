"""Runs a program in its own process group, which is gone when `run` returns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Completed:
    """How the program ended."""

    code: int
    output: str
    """Standard output and error together."""
    timed_out: bool


def run(argv: Sequence[str], *, timeout_s: float, stdin: str = "", pass_fds: Sequence[int] = ()) -> Completed:
    """Run a program to its end or to the deadline. `pass_fds`: descriptors that it inherits.

    Raises:
        FileNotFoundError: no such program.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=pass_fds,
    )
    timed_out = False
    try:
        output, _ = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        _kill(process)
        output, _ = process.communicate()
    except BaseException:
        _kill(process)
        process.wait()
        raise
    _kill(process)
    return Completed(process.returncode, output, timed_out)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
