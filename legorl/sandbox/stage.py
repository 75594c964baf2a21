"""Builds one sandbox: tmpfs, overlay, bubblewrap, and the supervisor's own way into it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.sandbox import layout, linux, seccomp

_FLAGS = linux.MS_NOSUID | linux.MS_NODEV
_INODES_PER_MB = 256


class StageError(Exception):
    """The sandbox could not be built; the message says why."""


@dataclass(frozen=True)
class Staged:
    """A sandbox that runs."""

    init_pid: int
    bubblewrap_pid: int
    upper_fd: int
    """Directory with the overlay's upper layer, on a mount that the sandbox cannot name."""


def prepare() -> None:
    """In the launcher: what all sandboxes share, in a mount namespace of the launcher's own."""
    os.umask(0o022)
    sleep = shutil.which("sleep")
    if sleep is None:
        raise StageError("no `sleep` on PATH")
    _private_mounts()
    linux.mount("tmpfs", layout.STAGE, "tmpfs", _FLAGS, "size=8m,mode=0755")
    stage = Path(layout.STAGE)
    (stage / "etc").mkdir()
    for name, text in layout.ETC_FILES.items():
        (stage / "etc" / name).write_text(text)
    for name in layout.ETC_COPIES:
        if Path("/etc", name).exists():
            shutil.copyfile(Path("/etc", name), stage / "etc" / name)
    for name in layout.etc_directories():
        (stage / "etc" / name).mkdir(parents=True)
    # Not readable, only executable: the kernel then lets no command trace the sandbox's init.
    shutil.copyfile(sleep, stage / "init")
    (stage / "init").chmod(0o111)
    Path(layout.BOX).mkdir()


def build(request: dict[str, Any], control: socket.socket) -> Staged:
    """Build one in the calling process, which afterwards is inside, without privileges.

    Raises:
        StageError: bubblewrap failed, the deadline passed, or the host gave up.
        OSError: a mount or a namespace failed.
    """
    _private_mounts()
    off = frozenset(request["off"])
    size = f"size={request['disk_mb']}m,nr_inodes={request['disk_mb'] * _INODES_PER_MB},"
    linux.mount("tmpfs", layout.BOX, "tmpfs", _FLAGS, ("" if "limits" in off else size) + "mode=0755")
    for name in ("upper", "work", *request["directories"]):
        os.mkdir(f"{layout.BOX}/{name}", 0o755)  # noqa: PTH102
    for name in ("tmp", "shm"):
        os.chmod(f"{layout.BOX}/{name}", 0o1777)  # noqa: PTH101
    _overlay(request["workspace"], privileged=request["privileged"])
    if request["root"]:
        _image_root(request["root"], privileged=request["privileged"])
    upper_fd = os.open(f"{layout.BOX}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    init_pid, bubblewrap_pid = _bubblewrap(request, control)
    linux.enter_namespaces(init_pid, own_network="network_closed" not in off)
    os.chdir("/")
    if "no_privileges" not in off:
        linux.drop_privileges()
        seccomp.deny_system_calls()
    linux.set_dumpable(False)
    linux.set_parent_death_signal(signal.SIGKILL)  # changing credentials cleared it
    return Staged(init_pid, bubblewrap_pid, upper_fd)


def unmount_image(serial: int) -> None:
    """Take away what `lazy_server` mounted; sandboxes that still use it keep it until they end."""
    for name in ("root", "file"):
        with contextlib.suppress(OSError):  # it may not have come so far
            linux.unmount(f"{layout.image_place(serial)}/{name}")


def _private_mounts() -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)


def _overlay(workspace: str, *, privileged: bool) -> None:
    # By descriptor: no character of the path means anything to overlayfs, and no path shows inside.
    lower = os.open(workspace, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    options = [
        f"lowerdir=/proc/self/fd/{lower}",
        f"upperdir={layout.BOX}/upper",
        f"workdir={layout.BOX}/work",
        # A snapshot reads the upper layer, so nothing in it may refer to the lower one.
        "redirect_dir=nofollow",
        "metacopy=off",
        "index=off",
    ]
    if not privileged:
        options.append("userxattr")
    linux.mount("overlay", f"{layout.BOX}/workspace", "overlay", _FLAGS, ",".join(options))
    os.close(lower)


def _image_root(image: str, *, privileged: bool) -> None:
    """The image with what a sandbox has of its own; mount points are made in the upper layer too.

    The image is not ours: its files are read as from within it, and what is written goes to the upper layer.
    """
    box = Path(layout.BOX)
    for name in ("root", "root-upper", "root-work"):
        (box / name).mkdir()
    upper = box / "root-upper"
    (upper / "etc").mkdir()
    for name, text in layout.image_etc(image).items():
        (upper / "etc" / name).write_text(text)
    # In a directory of its own: a program that is several, busybox, goes by its name.
    (upper / layout.IMAGE_INIT[1:]).parent.mkdir()
    sleep = linux.open_in_root(image, "bin/sleep", os.O_RDONLY)
    with os.fdopen(sleep, "rb") as source, open(f"{upper}{layout.IMAGE_INIT}", "wb") as target:  # noqa: PTH123
        shutil.copyfileobj(source, target)
        os.fchmod(target.fileno(), 0o111)
    lower = os.open(image, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    options = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={box}/root-work"
    options += "" if privileged else ",userxattr"
    linux.mount("overlay", f"{box}/root", "overlay", _FLAGS, options)
    os.close(lower)


def _bubblewrap(request: dict[str, Any], control: socket.socket) -> tuple[int, int]:
    """Run bubblewrap; returns the host pids of the sandbox's init and of bubblewrap itself."""
    out, info, errors = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    init = layout.IMAGE_INIT if request["root"] else layout.INIT
    # Init only exists: with SIGCHLD ignored the kernel reaps the orphans it adopts. It says when it is there.
    script = f"trap '' CHLD; echo ready; exec {init} infinity >/dev/null 2>&1"
    pid = os.posix_spawn(
        request["bwrap"],
        ["bwrap", "--info-fd", "3", *request["arguments"], "--", "/bin/sh", "-c", script],
        {},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, pipe[1], target) for pipe, target in ((out, 1), (errors, 2), (info, 3))
        ],
    )
    for pipe in (out, errors, info):
        os.close(pipe[1])
    poll = select.poll()
    poll.register(out[0], select.POLLIN)
    poll.register(control, select.POLLIN)
    events = poll.poll(request["timeout_s"] * 1000)
    if not events:
        raise StageError(f"bubblewrap was not ready after {request['timeout_s']} s")
    if any(fd == control.fileno() for fd, _ in events):
        raise StageError("the host gave up")
    if os.read(out[0], 16) != b"ready\n":
        message = os.read(errors[0], 4096).decode(errors="replace").strip()
        raise StageError(message or "bubblewrap ended without a word")
    init_pid = int(json.loads(os.read(info[0], 4096))["child-pid"])
    for pipe in (out, errors, info):
        os.close(pipe[0])
    return init_pid, pid
