"""What changed in a work tree: compared with what the host says was in it, and bounded in every direction.

Everything below the tree is the agent's and hostile: nothing is followed, nothing blocks. A file counts as
unchanged only if its contents have the digest they had; times and sizes are not believed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from legorl.sandbox.inside.files import opened

_CHUNK = 1 << 20


def digest(data: bytes) -> str:
    """Of a file's contents, or of a link's target."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Bounds:
    """How much is looked at and taken."""

    file_bytes: int
    total_bytes: int
    entries: int
    """Names that the host did not list."""
    depth: int


@dataclass
class Comparison:
    """What was found; `contents` are those of `changed`, one after another."""

    listed: Mapping[str, Sequence[object]]
    """Path -> kind and executable bit as `kind` gives them, size, digest."""
    bounds: Bounds
    ignored: Sequence[str]
    """Names, and endings of names that begin with `*`, which are no part of the tree."""
    changed: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, mode, size."""
    skipped: list[str] = field(default_factory=list)
    oversize: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    contents: bytearray = field(default_factory=bytearray)
    new: int = 0

    def run(self, root: str) -> None:
        """Look at everything below `root`."""
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._directory(fd, "", 0)
        finally:
            os.close(fd)

    def missing(self, root: str) -> list[str]:
        """Listed paths that are not there any more."""
        return sorted(path for path in self.listed if path not in self.seen and not _exists(root, path))

    def _directory(self, fd: int, path: str, depth: int) -> None:
        for name in os.listdir(fd):
            if any(name.endswith(word[1:]) if word[0] == "*" else name == word for word in self.ignored):
                continue
            child = f"{path}/{name}" if path else name
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if child not in self.listed:
                self.new += 1
                if self.new > self.bounds.entries:
                    self.skipped.append(child)
                    return
            if depth > self.bounds.depth:
                self.skipped.append(child)
                return
            self._entry(fd, name, child, status, depth)

    def _entry(self, parent: int, name: str, path: str, status: os.stat_result, depth: int) -> None:
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            with opened(parent, name, mode) as fd:
                self._directory(fd, path, depth + 1)
            return
        self.seen.add(path)
        if stat.S_ISLNK(mode):
            target = os.fsencode(os.readlink(name, dir_fd=parent))
            if self._listed(path, mode) != [len(target), digest(target)]:
                self._take(path, mode, target)
        elif stat.S_ISREG(mode):
            self._file(parent, name, path, status)
        else:
            self.skipped.append(path)

    def _file(self, parent: int, name: str, path: str, status: os.stat_result) -> None:
        size, before = status.st_size, self._listed(path, status.st_mode)
        if before and before[0] == size:
            with opened(parent, name, status.st_mode) as fd:
                if before[1] == _digest_of(fd, size):
                    return
        if size > self.bounds.file_bytes or len(self.contents) + size > self.bounds.total_bytes:
            self.oversize.append(path)
            return
        with opened(parent, name, status.st_mode) as fd:
            data = b""
            while len(data) < size and (piece := os.read(fd, size - len(data))):
                data += piece
        self._take(path, status.st_mode, data)

    def _listed(self, path: str, mode: int) -> list[object]:
        """Size and digest that this path had, if it was of the same kind."""
        before = self.listed.get(path)
        return list(before[1:]) if before and before[0] == kind(mode) else []

    def _take(self, path: str, mode: int, data: bytes) -> None:
        self.changed.append((path, mode, len(data)))
        self.contents += data


def kind(mode: int) -> str:
    """As git has it: link, program or file."""
    if stat.S_ISLNK(mode):
        return "link"
    return "program" if mode & 0o100 else "file"


def _digest_of(fd: int, size: int) -> str:
    result = hashlib.blake2b(digest_size=16)
    left = size
    while left > 0 and (piece := os.read(fd, min(left, _CHUNK))):
        result.update(piece)
        left -= len(piece)
    return result.hexdigest()


def _exists(root: str, path: str) -> bool:
    """Without following a link on the way; a directory in its place is not it."""
    *parents, _ = path.split("/")
    place = root
    for name in parents:
        place = f"{place}/{name}"
        if not os.path.lexists(place) or not stat.S_ISDIR(os.lstat(place).st_mode):
            return False
    full = f"{root}/{path}"
    return os.path.lexists(full) and not stat.S_ISDIR(os.lstat(full).st_mode)
