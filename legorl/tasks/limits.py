"""Memory and process limits of what validation runs: control groups where they can be made, else rlimits.

Invariant: a group lives as long as the block; what a killed validation left is removed by the next.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from legorl.sandbox.base import Limits
from legorl.sandbox.cgroups import Hierarchy, find, group_name, make, remove

MEMORY_MB = 2048
"""Of a cell, with all it writes: its file systems are memory."""
PROCESSES = 256

_serial = itertools.count(1)


@functools.cache
def _hierarchy() -> Hierarchy | None:
    """Found once; what dead owners left is removed then."""
    hierarchy = find()
    if hierarchy is not None:
        hierarchy.reap()
    return hierarchy


@contextlib.contextmanager
def limited() -> Iterator[list[str]]:
    """Words to put before a command, which is limited by them with everything it starts."""
    hierarchy = _hierarchy()
    if hierarchy is None:
        kilobytes = MEMORY_MB << 10
        yield ["bash", "-c", f'ulimit -d {kilobytes} -u {PROCESSES}; exec "$@"', "limited"]
        return
    limits = Limits(memory_mb=MEMORY_MB, disk_mb=0, pids=PROCESSES)
    groups = hierarchy.groups(group_name(next(_serial)), limits)
    made: list[tuple[int, Path]] = []
    try:
        for group in groups:
            made.append((make(group), Path(group.directory)))
        enter = " && ".join(f'echo $$ >"{directory}/cgroup.procs"' for _, directory in made)
        yield ["bash", "-c", f'{enter} && exec "$@"', "limited"]
    finally:
        for lock, directory in made:
            remove(directory)
            os.close(lock)
