"""Builds the sandbox in its pod: the agent container's file system, in namespaces that the guard makes.

    guard's container ─ guard ─ supervisor ─ init (own process, network, mount namespace)
                                    └─ keepers ─ commands

The supervisor takes its mounts from the guard's container into a copy of the agent container's mount
namespace: work tree (an overlay), /tmp, home and shared memory lie on one tmpfs of limited size. The agent
container itself only holds image, mounts and control groups; nothing of the agent runs in its process
namespace.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

from legorl.sandbox import layout, linux, seccomp
from legorl.sandbox.stage import Staged, StageError

PLACE = "/run/legorl"
"""A volume of the guard's container alone."""
PRISTINE = f"{PLACE}/pristine"
"""The task's tree, below the overlay."""
MARK = b"LEGORL_CONTAINER=agent"
"""In the environment of the agent container's main process."""
_BOX = f"{PLACE}/box"
_FLAGS = linux.MS_NOSUID | linux.MS_NODEV
_INODES_PER_MB = 256
_HIDDEN_FILES = ("kcore", "keys", "latency_stats", "sched_debug", "sysrq-trigger", "timer_list")
_HIDDEN_DIRECTORIES = ("acpi", "scsi")
"""Below /proc, as container runtimes hide them."""
_READ_ONLY = ("bus", "fs", "irq", "sys")
_MS_NOEXEC = 8
_MS_RDONLY = 1
_MS_REMOUNT = 32
_MS_BIND = 4096


def find_agent() -> int:
    """Pid of the agent container's main process in the pod's process namespace. Raises `StageError`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if MARK in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
    raise StageError("no process of the agent container is in the pod's process namespace")


def build(request: dict[str, Any], control: socket.socket) -> Staged:
    """Build in the calling process, which afterwards is inside, without privileges.

    Raises:
        StageError: init failed, or the deadline passed.
        OSError: a mount, a namespace or a control group failed.
    """
    off = frozenset(request["off"])
    for directory in request["joined"]:
        Path(directory, "cgroup.procs").write_text("0")
    upper, trees = _prepare(request, off)
    agent = request["agent"]
    with open(f"/proc/{agent}/ns/mnt", "rb") as namespace:  # noqa: PTH123
        linux.setns(namespace.fileno(), linux.CLONE_NEWNS)
    _own_mounts()
    for tree, target in trees:
        linux.move_mount(tree, target)
        os.close(tree)
    with contextlib.suppress(OSError):
        linux.unmount("/dev/termination-log")  # a file of the node that everybody may write
    kinds = linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    linux.unshare(kinds if "network_closed" in off else kinds | linux.CLONE_NEWNET)
    init = _start_init(off, request["timeout_s"])
    os.chdir("/")
    _give_up_privileges(off)
    return Staged(init, init, upper)


def _give_up_privileges(off: frozenset[str]) -> None:
    if "no_privileges" not in off:
        linux.become(layout.UID)
        seccomp.deny_system_calls(namespaces=True)
    linux.set_dumpable(False)
    linux.set_parent_death_signal(signal.SIGKILL)  # changing credentials cleared it


def _own_mounts() -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)


def _prepare(request: dict[str, Any], off: frozenset[str]) -> tuple[int, list[tuple[int, str]]]:
    """Make the mounts, in the guard's file system; the overlay's upper layer, and mounts with targets."""
    _own_mounts()
    uid = 0 if "no_privileges" in off else layout.UID
    Path(_BOX).mkdir(exist_ok=True)
    size = f"size={request['disk_mb']}m,nr_inodes={request['disk_mb'] * _INODES_PER_MB},"
    linux.mount("tmpfs", _BOX, "tmpfs", _FLAGS, ("" if "limits" in off else size) + "mode=0755")
    directories: dict[str, str] = request["directories"]
    for name in ("upper", "work", *directories):
        os.mkdir(f"{_BOX}/{name}", 0o755)  # noqa: PTH102
        os.chown(f"{_BOX}/{name}", uid, uid)
    for name in ("tmp", "shm"):
        os.chmod(f"{_BOX}/{name}", 0o1777)  # noqa: PTH101
    # A snapshot reads the upper layer, so nothing in it may refer to the lower one.
    layers = f"lowerdir={PRISTINE},upperdir={_BOX}/upper,workdir={_BOX}/work"
    options = f"{layers},redirect_dir=nofollow,metacopy=off,index=off"
    linux.mount("overlay", f"{_BOX}/workspace", "overlay", _FLAGS, options)
    targets = {f"{_BOX}/{name}": target for name, target in directories.items()}
    for name, line in (("passwd", "agent:x:{0}:{0}::{1}:/bin/sh"), ("group", "agent:x:{0}:")):
        original = Path(f"/proc/{request['agent']}/root/etc/{name}")
        if original.is_file():
            text = original.read_text().rstrip("\n")
            Path(_BOX, name).write_text(f"{text}\n{line.format(layout.UID, layout.HOME)}\n")
            targets[f"{_BOX}/{name}"] = f"/etc/{name}"
    upper = os.open(f"{_BOX}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return upper, [(linux.open_tree(source), target) for source, target in targets.items()]


def _start_init(off: frozenset[str], timeout_s: float) -> int:
    """The first process of the new process namespace; it only exists, and the kernel reaps what it adopts."""
    answer, say = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        _init(off, say)
    os.close(say)
    ready, _, _ = select.select([answer], [], [], timeout_s)
    text = os.read(answer, 4096) if ready else b"no answer in time"
    os.close(answer)
    if text != b"ready":
        raise StageError(f"init did not start: {text.decode(errors='replace')}")
    return pid


def _init(off: frozenset[str], say: int) -> NoReturn:
    try:
        linux.set_parent_death_signal(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # which the kernel does not deliver to a first process
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        socket.sethostname("sandbox")
        if "network_closed" not in off:
            linux.bring_up_loopback()
        _mount_proc(off)
        os.dup2(say, 0)
        os.closerange(1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
        _give_up_privileges(off)
        os.write(0, b"ready")
        os.close(0)
        while True:
            signal.pause()
    except OSError as error:
        os.write(say, str(error).encode())
    finally:
        os._exit(1)


def _mount_proc(off: frozenset[str]) -> None:
    """Of the new process namespace, with the kernel's settings and secrets hidden as a container's are."""
    linux.mount("proc", "/proc", "proc", _FLAGS | _MS_NOEXEC)
    if "no_privileges" in off:
        return
    for name in _READ_ONLY:
        path = f"/proc/{name}"
        if Path(path).is_dir():
            linux.mount(path, path, "", _MS_BIND | linux.MS_REC)
            linux.mount(path, path, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _FLAGS | _MS_NOEXEC)
    for name in _HIDDEN_FILES:
        if Path("/proc", name).exists():
            linux.mount("/dev/null", f"/proc/{name}", "", _MS_BIND)
    for name in _HIDDEN_DIRECTORIES:
        if Path("/proc", name).is_dir():
            linux.mount("tmpfs", f"/proc/{name}", "tmpfs", _FLAGS | _MS_RDONLY)
