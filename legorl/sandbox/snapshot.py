"""What an agent left: read from the overlay's upper layer on the host, or by a container's PID 1.

Everything below the upper directory is the agent's and hostile: nothing is followed, nothing blocks, and
the amount read is bounded. What does not fit, or is neither a file nor a link, is left out and named in
`Snapshot.skipped`. The overlay's own marks (whiteouts, opaque directories) cannot be made by a process in
the sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.errors import TransferError
from legorl.sandbox.base import Snapshot
from legorl.sandbox.patch import Blob, file_patch

FILE_BYTES = 8 << 20
TOTAL_BYTES = 64 << 20
ENTRIES = 20_000
DEPTH = 64
BOUNDS = {"file_bytes": FILE_BYTES, "total_bytes": TOTAL_BYTES, "entries": ENTRIES, "depth": DEPTH}
IGNORED = (".git", "__pycache__", "*.pyc")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def ignored(name: str) -> bool:
    """Names that are no part of a repository's state: git's own directory and byte code."""
    return any(name.endswith(word[1:]) if word[0] == "*" else name == word for word in IGNORED)


def contained(snapshot: Snapshot) -> Snapshot:
    """The snapshot without paths that lead out of the workspace or into git's directory; they are `skipped`.

    No provider should deliver one; an agent that found out how to make it do so must gain nothing.
    """
    wrong = {path for path in snapshot.changed if not _stays_inside(path)}
    if not wrong:
        return snapshot
    return dataclasses.replace(
        snapshot,
        changed={path: data for path, data in snapshot.changed.items() if path not in wrong},
        modes={path: mode for path, mode in snapshot.modes.items() if path not in wrong},
        skipped=tuple(sorted({*snapshot.skipped, *wrong})),
    )


def _stays_inside(path: str) -> bool:
    parts = path.split("/")
    return "\0" not in path and not {"", ".", "..", ".git"} & set(parts)


def take_snapshot(upper: int, workspace: Path, opaque_attribute: str) -> Snapshot:
    """Compare the upper layer with the pristine workspace.

    Args:
        upper: descriptor of the upper directory; stays open.
        workspace: the lower layer.
        opaque_attribute: extended attribute with which overlayfs marks an opaque directory.

    Raises:
        TransferError: it could not be read.
    """
    walk = _Walk(opaque_attribute)
    old: dict[str, Blob] = {}
    try:
        walk.directory(upper, "", 0)
        for path in walk.hiding:
            old.update(_lower_files(workspace, path))
    except OSError as error:
        raise TransferError(f"the workspace could not be read: {error}") from error
    return _snapshot(old, walk.found, walk.skipped, walk.oversize)


def compared(workspace: Path, answer: Mapping[str, Any], contents: bytes) -> Snapshot:
    """A snapshot from what `inside.tree.Comparison` found in a container.

    Args:
        workspace: the pristine tree.
        answer: `changed`, `missing`, `skipped` and `oversize`.
        contents: of `changed`, one after another.

    Raises:
        TransferError: a path leads out of the tree, or the pristine tree cannot be read.
    """
    found: dict[str, Blob] = {}
    position = 0
    for path, mode, size in answer["changed"]:
        found[path] = Blob(contents[position : position + size], mode)
        position += size
    old: dict[str, Blob] = {}
    for path in (*found, *answer["missing"], *answer["oversize"]):
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise TransferError(f"the work tree has the impossible path {path!r}")
        try:
            old.update(_lower_files(workspace, path))
        except OSError as error:
            raise TransferError(f"the workspace could not be read: {error}") from error
    return _snapshot(old, found, answer["skipped"], answer["oversize"])


def _snapshot(
    old: Mapping[str, Blob], found: Mapping[str, Blob], skipped: Sequence[str], oversize: Sequence[str]
) -> Snapshot:
    changed: dict[str, bytes | None] = {}
    modes: dict[str, int] = {}
    patches = []
    for path in sorted((old.keys() | found.keys()) - set(oversize)):
        before, after = old.get(path), found.get(path)
        if before and after and (before.data, before.git_mode) == (after.data, after.git_mode):
            continue
        changed[path] = after.data if after else None
        if after:
            modes[path] = after.mode if stat.S_ISLNK(after.mode) else stat.S_IMODE(after.mode)
        patches.append(file_patch(os.fsencode(path), before, after))
    return Snapshot(changed, modes, "".join(patches), tuple(sorted((*skipped, *oversize))))


@dataclass
class _Walk:
    """Reads the upper layer."""

    opaque_attribute: str
    found: dict[str, Blob] = field(default_factory=dict)
    hiding: list[str] = field(default_factory=list)
    """Paths at and below which the lower layer does not show through."""
    skipped: list[str] = field(default_factory=list)
    oversize: list[str] = field(default_factory=list)
    """Regular files too large to take: they count as unchanged."""
    entries: int = 0
    total: int = 0

    def directory(self, fd: int, path: str, depth: int) -> None:
        """Read one directory and those below it."""
        for name in os.listdir(fd):
            if ignored(name):
                continue
            child = f"{path}/{name}" if path else name
            self.entries += 1
            if self.entries > ENTRIES or depth > DEPTH:
                self.skipped.append(child)
                return
            self._entry(fd, name, child, depth)

    def _entry(self, parent: int, name: str, path: str, depth: int) -> None:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            with _opened(parent, name) as fd:
                if self._opaque(fd):
                    self.hiding.append(path)
                self.directory(fd, path, depth + 1)
            return
        self.hiding.append(path)
        if stat.S_ISLNK(mode):
            self.found[path] = Blob(os.fsencode(os.readlink(name, dir_fd=parent)), mode)
        elif stat.S_ISREG(mode):
            if status.st_size > FILE_BYTES or self.total + status.st_size > TOTAL_BYTES:
                self.oversize.append(path)
                return
            with _opened(parent, name) as fd:
                data = os.read(fd, FILE_BYTES)
            self.total += len(data)
            self.found[path] = Blob(data, mode)
        elif not (stat.S_ISCHR(mode) and status.st_rdev == 0):  # not a whiteout
            self.skipped.append(path)

    def _opaque(self, fd: int) -> bool:
        with contextlib.suppress(OSError):
            return os.getxattr(fd, self.opaque_attribute) == b"y"
        return False


@contextlib.contextmanager
def _opened(parent: int, name: str) -> Iterator[int]:
    fd = os.open(name, _OPEN, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


def _lower_files(workspace: Path, path: str) -> Iterator[tuple[str, Blob]]:
    """Files and links of the pristine workspace at and below a path."""
    full = workspace / path
    try:
        mode = full.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        yield path, Blob(os.fsencode(full.readlink()), mode)
    elif stat.S_ISREG(mode):
        yield path, Blob(full.read_bytes(), mode)
    elif stat.S_ISDIR(mode):
        for entry in full.iterdir():
            if not ignored(entry.name):
                yield from _lower_files(workspace, f"{path}/{entry.name}")
