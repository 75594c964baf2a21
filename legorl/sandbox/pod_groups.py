"""The agent container's control groups, as the privileged guard in the same pod reaches them.

Commands run in a group below the container's own, so that their memory and process limits are the sandbox's
and the end of one of them is not the end of the container.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from legorl.sandbox import linux
from legorl.sandbox.base import Limits
from legorl.sandbox.cgroups import Group, Hierarchy
from legorl.sandbox.pod_stage import PLACE

_NAME = "legorl"
_CONTROLLERS = frozenset({"cpu", "cpuacct", "cpuset", "memory", "pids", "blkio", "freezer", "devices"})


@dataclass(frozen=True)
class Groups:
    """What a process of the sandbox joins."""

    made: tuple[Group, ...]
    """New groups, with limits."""
    joined: tuple[str, ...]
    """Directories of the container's groups."""


def groups_of(pid: int, limits: Limits | None) -> Groups:
    """Groups for a sandbox in the container of this process; no limits of their own where None.

    Raises:
        OSError: the hierarchy cannot be reached or changed.
    """
    places: dict[str, Path] = {}
    unified: Path | None = None
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            unified = Path(path)
        elif set(controllers.split(",")) & _CONTROLLERS:
            places |= dict.fromkeys(controllers.split(","), _mounted("cgroup", controllers) / path[1:])
    if {"memory", "pids"} <= places.keys():
        own = {"memory", "pids"} if limits else set()
        joined = {str(path) for controller, path in places.items() if controller not in own}
        made = Hierarchy(1, places["memory"], places["pids"]).groups(_NAME, limits) if limits else []
        return Groups(tuple(made), tuple(sorted(joined)))
    if unified is None:
        raise OSError("no control groups of memory and processes")
    container = _mounted("cgroup2", "") / str(unified)[1:]
    if limits is None:
        return Groups((), (str(container),))
    _make_inner(container)
    return Groups(tuple(Hierarchy(2, container, container).groups(_NAME, limits)), ())


def _mounted(fstype: str, options: str) -> Path:
    place = Path(PLACE, "cgroup", options or "unified")
    if not os.path.ismount(place):
        place.mkdir(parents=True, exist_ok=True)
        linux.mount("cgroup", str(place), fstype, linux.MS_NOSUID | linux.MS_NODEV, options)
    return place


def _make_inner(container: Path) -> None:
    """Version 2: only a group without processes of its own may hand its controllers down."""
    main = container / "main"
    main.mkdir(exist_ok=True)
    for pid in (container / "cgroup.procs").read_text().split():
        (main / "cgroup.procs").write_text(pid)
    (container / "cgroup.subtree_control").write_text("+memory +pids")
