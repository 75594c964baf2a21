"""Builds one sandbox: tmpfs, overlay, bubblewrap, and the supervisor's own way into it."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.sandbox import layout, linux


class StageError(Exception):
    """The sandbox could not be built; the message says why."""


@dataclass(frozen=True)
class Staged:
    """A sandbox that runs."""

    init_pid: int
    bubblewrap_pid: int
    upper_fd: int
    """Directory with the overlay's upper layer, on a mount that the sandbox cannot name."""


def build(request: dict[str, Any], control: socket.socket) -> Staged:
    """Build it in the calling process, which afterwards is inside, without privileges.

    Raises:
        StageError: bubblewrap failed, the deadline passed, or the host gave up.
        OSError: a mount or a namespace failed.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    size = f"size={request['disk_mb']}m,nr_inodes={request['disk_mb'] * 256},mode=0755"
    linux.mount("tmpfs", layout.STAGE, "tmpfs", flags, size)
    _fill(Path(layout.STAGE))
    # By descriptor: no character of the path means anything to overlayfs, and no path shows inside.
    workspace = os.open(request["workspace"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    lower = f"lowerdir=/proc/self/fd/{workspace},upperdir={layout.UPPER},workdir={layout.STAGE}/work"
    options = f"{lower},redirect_dir=off,metacopy=off,index=off" + (
        "" if request["privileged"] else ",userxattr"
    )
    linux.mount("overlay", f"{layout.STAGE}/workspace", "overlay", flags, options)
    os.close(workspace)
    upper_fd = os.open(layout.UPPER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    init_pid, bubblewrap_pid = _bubblewrap(request, control)
    linux.enter_namespaces(init_pid)
    os.chdir("/")
    linux.drop_privileges()
    linux.set_dumpable(False)
    linux.set_parent_death_signal(signal.SIGKILL)  # changing credentials cleared it
    return Staged(init_pid, bubblewrap_pid, upper_fd)


def _fill(stage: Path) -> None:
    os.umask(0o022)
    for name in ("upper", "work", "etc", *(Path(path).name for path in layout.WRITABLE)):
        (stage / name).mkdir()
    for name in ("tmp", "shm"):
        (stage / name).chmod(0o1777)
    for name, text in layout.ETC_FILES.items():
        (stage / "etc" / name).write_text(text)
    for name in layout.ETC_COPIES:
        if Path("/etc", name).exists():
            shutil.copyfile(Path("/etc", name), stage / "etc" / name)
    for name in layout.etc_directories():
        (stage / "etc" / name).mkdir(parents=True)
    # Not readable, only executable: the kernel then lets no command trace the sandbox's init.
    shutil.copyfile("/usr/bin/sleep", stage / "init")
    (stage / "init").chmod(0o111)


def _bubblewrap(request: dict[str, Any], control: socket.socket) -> tuple[int, int]:
    """Run bubblewrap; returns the host pids of the sandbox's init and of bubblewrap itself."""
    info_read, info_write = os.pipe2(os.O_CLOEXEC)
    # Init only exists: with SIGCHLD ignored the kernel reaps the orphans it adopts. It says when it is there.
    script = f"trap '' CHLD; echo ready; exec {layout.INIT} infinity >/dev/null 2>&1"
    process = subprocess.Popen(
        [
            request["bwrap"],
            "--info-fd",
            str(info_write),
            *request["arguments"],
            "--",
            "/bin/sh",
            "-c",
            script,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(info_write,),
        env={},
    )
    os.close(info_write)
    assert process.stdout is not None and process.stderr is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    poll.register(control, select.POLLIN)
    end = time.monotonic() + request["timeout_s"]
    events = poll.poll(max(0.0, end - time.monotonic()) * 1000)
    if not events:
        raise StageError(f"bubblewrap was not ready after {request['timeout_s']} s")
    if any(fd == control.fileno() for fd, _ in events):
        raise StageError("the host gave up")
    if os.read(process.stdout.fileno(), 16) != b"ready\n":
        message = os.read(process.stderr.fileno(), 4096).decode(errors="replace").strip()
        raise StageError(message or f"bubblewrap ended with status {process.wait(1)} and without a word")
    init_pid = int(json.loads(os.read(info_read, 4096))["child-pid"])
    os.close(info_read)
    process.stdout.close()
    process.stderr.close()
    return init_pid, process.pid
