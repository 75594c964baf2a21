"""A directory of a cache that several processes may make at once.

Invariant: it appears complete or not at all, and whoever is slower keeps the other's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def made_aside(directory: Path) -> Iterator[Path]:
    """A path beside `directory`, not there yet, to make a tree at; the tree becomes `directory` at the end.

    Nothing of it stays when the body raises. Raises `OSError` where it cannot be made or moved.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        tree = partial / "tree"
        yield tree
        try:
            tree.rename(directory)
        except OSError:
            if not directory.is_dir():  # or another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
