"""What a trial may leave behind: nothing. Compares processes and mounts before and after."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            if int(status.rpartition(")")[2].split()[1]) == pid:
                found |= {int(entry.name)} | _descendants(int(entry.name))
    return found


@contextmanager
def no_leftovers(patience_s: float = 5.0) -> Iterator[None]:
    """Fails when a process below this one or a mount came and did not go.

    A process that ends with its parent may take a moment; `patience_s` bounds it.
    """
    me = os.getpid()
    processes, mounts = _descendants(me), Path("/proc/self/mounts").read_text()
    yield
    deadline = time.monotonic() + patience_s
    while (left := _descendants(me) - processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = []
    for pid in left:
        try:
            commands.append((Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    assert not commands, f"processes were left behind: {commands}"
    assert Path("/proc/self/mounts").read_text() == mounts, "a mount was left behind"
