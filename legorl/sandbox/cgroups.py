"""Memory and process limits of a sandbox as control groups, version 1 or 2, where one may be created.

Invariant: a group's name carries the pid and start time of the process that owns it, so what a killed owner
left is recognised and removed by the next one (`reap`), and a living owner's groups are never touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from legorl.sandbox.base import Limits

_PREFIX = "legorl-"
_OWN_PIDS = 4
"""Processes of ours in the group: supervisor, a keeper, bubblewrap and init."""


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
            for directory in parent.glob(f"{_PREFIX}*"):
                if not _owner_lives(directory.name):
                    _kill_members(directory)
                    remove(directory)


def group_name(owner: int, serial: int) -> str:
    """Name of a group; `owner` is a living pid."""
    return f"{_PREFIX}{owner}-{_start_time(owner)}-{serial}"


def join(group: Group) -> None:
    """Create the group and move this process into it."""
    os.mkdir(group.directory)  # noqa: PTH102
    for name, value in (*group.files.items(), ("cgroup.procs", "0")):
        with open(f"{group.directory}/{name}", "w") as stream:  # noqa: PTH123
            stream.write(value)


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
        for group in hierarchy.groups(f"{group_name(os.getpid(), 0)}-probe", Limits()):
            directory = Path(group.directory)
            directory.mkdir(exist_ok=True)
            made.append(directory)
            for name, value in group.files.items():
                (directory / name).write_text(value)
    except OSError:
        return False
    finally:
        for directory in made:
            remove(directory)
    return True


def _kill_members(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (directory / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def _start_time(pid: int) -> str:
    """Clock ticks between boot and the start of `pid`; empty when there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _owner_lives(name: str) -> bool:
    pid, start = name.removeprefix(_PREFIX).split("-")[:2]
    return bool(start) and _start_time(int(pid)) == start
