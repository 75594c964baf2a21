"""How a process of another program (a harness's fork server) joins a running sandbox.

Standard library only, so that a script which does not import this project can load it by path.

    child = os.fork()                      # in a single-threaded process
    if child == 0:
        enter(join)                        # namespaces, limits, no privileges
        worker = os.fork()                 # only children are in the process namespace
        ...

What `enter` does: all namespaces of `init_pid` in one setns(2) call by pidfd (one by one does not work: the
user namespace is nested, so it would have to come last, and it is the one that grants the rest), `chdir`,
no new privileges, no capabilities, the seccomp filter, not traceable. The process then has uid 1000 as its
commands will. Orphans of a joined process are adopted by the sandbox's init and end at the next change of
phase. The joining program must wait for its children: the kernel keeps a process namespace, and so `stop`
waits, while one of them is a zombie.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from legorl.sandbox import linux, seccomp


@dataclass(frozen=True)
class Join:
    """A sandbox, for a process that wants to join it."""

    init_pid: int
    env: Mapping[str, str] = field(default_factory=dict)
    """Exactly the environment `exec` would give."""
    cwd: str = "/workspace"
    groups: tuple[str, ...] = ()
    """Directories of the sandbox's control groups, which the joining process enters."""
    own_network: bool = True
    """False when the rule `network_closed` is off."""
    privileged: bool = False
    """True when the rule `no_privileges` is off."""


def enter(join: Join) -> None:
    """Make the calling, single-threaded process a part of the sandbox; its later children are wholly inside.

    Raises:
        OSError: the sandbox is gone, or this process may not join it.
    """
    for directory in join.groups:
        Path(directory, "cgroup.procs").write_text("0")
    linux.enter_namespaces(join.init_pid, own_network=join.own_network)
    os.chdir(join.cwd)
    if not join.privileged:
        linux.drop_privileges()
        seccomp.deny_system_calls()
    linux.set_dumpable(False)
    linux.set_parent_death_signal(signal.SIGKILL)
