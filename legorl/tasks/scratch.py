"""A temporary directory beside what is built in it.

Invariant: it is gone when the block ends; what a killed process left is removed by the next one that asks for
the same place.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory in `parent` (made if need be) whose name begins with `prefix`; it holds a `lock`."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (left / "lock").open() as lock:
            # Refused, with an OSError, while the process that builds there lives.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as directory,
        (Path(directory) / "lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(directory)
