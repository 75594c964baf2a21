"""The pristine work tree as a container gets it: in batches of files, with a list to compare with later."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from legorl.sandbox.inside.tree import digest, kind
from legorl.sandbox.snapshot import ignored

_BATCH_BYTES = 4 << 20
_BATCH_FILES = 2_000

Entry = tuple[str, int, int, int | None]
"""Path, mode with type, size, modification time in ns."""


@dataclass
class Pristine:
    """A tree on the host. `listed` is complete when `batches` has ended."""

    workspace: Path
    listed: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    """Path -> kind, size, digest; what a snapshot ignores is not listed."""

    def batches(self, target: str) -> Iterator[tuple[list[Entry], bytes]]:
        """Entries with paths below `target`, and their contents one after another.

        Raises:
            OSError: something cannot be read, or is neither file, link nor directory.
        """
        entries: list[Entry] = []
        contents = bytearray()
        for path in self._walk(self.workspace):
            status = path.lstat()
            mode, name = status.st_mode, path.relative_to(self.workspace).as_posix()
            if stat.S_ISLNK(mode):
                data = os.fsencode(path.readlink())
            elif stat.S_ISREG(mode):
                data = path.read_bytes()
            elif stat.S_ISDIR(mode):
                data = b""
            else:
                raise OSError(f"{path} is neither a file nor a link nor a directory")
            if not stat.S_ISDIR(mode) and not any(map(ignored, name.split("/"))):
                self.listed[name] = kind(mode), len(data), digest(data)
            entries.append((f"{target}/{name}", mode, len(data), status.st_mtime_ns))
            contents += data
            if len(contents) >= _BATCH_BYTES or len(entries) >= _BATCH_FILES:
                yield entries, bytes(contents)
                entries, contents = [], bytearray()
        if entries:
            yield entries, bytes(contents)

    def _walk(self, directory: Path) -> Iterator[Path]:
        for path in sorted(directory.iterdir()):
            yield path
            if path.is_dir() and not path.is_symlink():
                yield from self._walk(path)
