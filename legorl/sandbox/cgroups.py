"""Memory and process limits of a sandbox as control groups, version 1 or 2, where one may be created.

Invariant: who made a group holds a lock on its directory while it lives, so what a killed owner left is
recognised and removed by the next one (`reap`), and a living owner's groups are never touched. A pid in the
name would not do: runs have PID namespaces of their own, in which another's pids mean nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from legorl.sandbox.base import Limits

_PREFIX = "legorl-"
GROUPS = f"{_PREFIX}{'?' * 12}-*"
"""Matches the names of `group_name`."""
_OWN_PIDS = 4
"""Processes of ours in the group: supervisor, a keeper, bubblewrap and init."""
_OWN_S = 5.0
"""How long to try for a new group of one's own."""


@dataclass(frozen=True)
class Group:
    """One group to make: its directory and the files to write in it."""

    directory: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Hierarchy:
    """Where groups can be made: this process's own group, a directory per controller in version 1."""

    version: int
    memory: Path
    pids: Path

    def groups(self, name: str, limits: Limits) -> list[Group]:
        """Groups of one sandbox. The memory limit includes its disk, which is memory too."""
        memory = str((limits.memory_mb + limits.disk_mb) << 20)
        pids = str(limits.pids + _OWN_PIDS)
        if self.version == 2:
            files = {"memory.max": memory, "pids.max": pids}
            return [Group(str(self.memory / name), files)]
        return [
            Group(str(self.memory / name), {"memory.limit_in_bytes": memory}),
            Group(str(self.pids / name), {"pids.max": pids}),
        ]

    def reap(self) -> None:
        """Remove groups whose owner is dead, with every process in them."""
        for parent in {self.memory, self.pids}:
            for directory in parent.glob(GROUPS):
                lock = _lock(str(directory))
                if lock is not None:
                    _kill_members(directory)
                    remove(directory)
                    os.close(lock)


def group_name(serial: int) -> str:
    """A name that no other group has."""
    return f"{_PREFIX}{os.urandom(6).hex()}-{serial}"


def make(group: Group) -> int:
    """Create the group; the descriptor that is returned owns it until it is closed, or its holder ends.

    Raises:
        OSError: it cannot be made or limited.
    """
    end = time.monotonic() + _OWN_S
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(group.directory)  # noqa: PTH102
        lock = _lock(group.directory)
        if lock is not None:
            break
        # Another process takes it for a dead owner's, in the instant before it is locked, and removes it.
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, "somebody else holds the control group", group.directory)
        time.sleep(0.001)
    try:
        for name, value in group.files.items():
            _write(group, name, value)
    except OSError:
        remove(Path(group.directory))
        os.close(lock)
        raise
    return lock


def join(group: Group) -> None:
    """Create the group and move this process into it; it owns the group until it ends."""
    make(group)
    _write(group, "cgroup.procs", "0")


def remove(directory: Path, deadline_s: float = 1.0) -> bool:
    """Remove a group, waiting a little for its last processes to go; True when it is gone."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            directory.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        else:
            return True


def find() -> Hierarchy | None:
    """The hierarchy in which this process may make groups, None where it may not."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    mounts: dict[str, tuple[Path, str]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        fstype, _, options = right.split(" ", 2)
        if fstype == "cgroup2":
            mounts[""] = (Path(point), root)
        elif fstype == "cgroup":
            for controller in ("memory", "pids"):
                if controller in options.split(","):
                    mounts[controller] = (Path(point), root)

    def directory(controller: str) -> Path | None:
        if controller not in own or controller not in mounts:
            return None
        point, root = mounts[controller]
        relative = os.path.relpath(own[controller], root)
        return point if relative.startswith("..") else point / relative

    memory, pids, unified = directory("memory"), directory("pids"), directory("")
    if memory is not None and pids is not None:
        candidate = Hierarchy(1, memory, pids)
    elif unified is not None:
        candidate = Hierarchy(2, unified, unified)
    else:
        return None
    return candidate if _usable(candidate) else None


def _usable(hierarchy: Hierarchy) -> bool:
    made = []
    try:
        for group in hierarchy.groups(group_name(0), Limits()):
            made.append((make(group), Path(group.directory)))
    except OSError:
        return False
    finally:
        for lock, directory in made:
            remove(directory)
            os.close(lock)
    return True


def _write(group: Group, name: str, value: str) -> None:
    with open(f"{group.directory}/{name}", "w") as stream:  # noqa: PTH123
        stream.write(value)


def _lock(directory: str) -> int | None:
    """Own the group if nobody does; None when somebody does, or when it is gone."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(directory)):  # noqa: PTH116
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _kill_members(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in map(int, (directory / "cgroup.procs").read_text().split()):
            if pid:  # 0 is a process that this PID namespace cannot see
                os.kill(pid, signal.SIGKILL)
