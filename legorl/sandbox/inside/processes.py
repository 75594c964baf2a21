"""Processes as /proc shows them, and ending those below this one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict

_STEP_S = 0.002


def processes() -> dict[int, tuple[int, str]]:
    """Pid -> parent and state, of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stream:  # noqa: PTH123
                state, parent = stream.read().rpartition(")")[2].split()[:2]
                found[int(name)] = (int(parent), state)
    return found


def descendants(root: int) -> list[int]:
    """Pids below `root`, parents before their children."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in processes().items():
        children[parent].append(pid)
    found = list(children[root])
    for pid in found:
        found += children[pid]
    return found


def reap_all() -> bool:
    """Collect every dead child; False when no child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def end_descendants(within_s: float) -> bool:
    """Kill and collect everything below this process, a subreaper; False when some are left (a fork bomb)."""
    end = time.monotonic() + within_s
    while reap_all():
        if time.monotonic() > end:
            return False
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_STEP_S)
    return True
