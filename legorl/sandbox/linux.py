"""The few Linux calls that Python's standard library lacks: mounts, namespaces, capabilities.

Every function raises `OSError` with the name of the call. Standard library only: the launcher, which has no
site-packages, imports it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REC = 16384
MS_PRIVATE = 1 << 18

_OPENAT2 = 437
"""On every architecture."""
_RESOLVE_IN_ROOT = 0x10

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522

_OPEN_TREE, _MOVE_MOUNT = 428, 429  # the same on every architecture
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MNT_DETACH = 2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


def mount(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mount {fstype or source} on {target}")


def open_tree(path: str) -> int:
    """A mount of what lies at `path`, attached nowhere yet: it can go into another mount namespace."""
    fd = _libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    _check(fd, f"open_tree {path}")
    return int(fd)


def move_mount(fd: int, target: str) -> None:
    """Attach what `open_tree` gave."""
    arguments = (fd, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(_libc.syscall(_MOVE_MOUNT, *arguments), f"move_mount to {target}")


def unmount(target: str) -> None:
    """Detach what is mounted there."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def bring_up_loopback() -> None:
    """Of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xH", request)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def open_in_root(root: str, path: str, flags: int) -> int:
    """openat2(2): a path as it is seen by who has `root` for its root directory, links included."""
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
        fd = int(_libc.syscall(_OPENAT2, directory, path.encode(), how, ctypes.sizeof(how)))
        _check(fd, f"openat2 {path}")
        return fd
    finally:
        os.close(directory)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """setns(2); `fd` may be a pidfd."""
    _check(_libc.setns(fd, flags), "setns")


def _prctl(option: int, value: int, call: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), call)


def set_parent_death_signal(number: signal.Signals) -> None:
    """Be sent this signal when the thread that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, number, "prctl(PR_SET_PDEATHSIG)")


def set_child_subreaper() -> None:
    """Adopt orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "prctl(PR_SET_CHILD_SUBREAPER)")


def set_dumpable(dumpable: bool) -> None:
    """Without it, no process of the same user may trace this one or read its memory."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable), "prctl(PR_SET_DUMPABLE)")


def refuse_new_privileges() -> None:
    """Gain nothing by executing a file, for ever, nor let descendants."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")


def drop_privileges() -> None:
    """Give up every capability for ever, and the ability to gain one by executing a file."""
    refuse_new_privileges()
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, "prctl(PR_CAP_AMBIENT)")
    _drop_bounding_set()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def become(uid: int) -> None:
    """From root to this user and its group, without privileges or a way back to them."""
    _drop_bounding_set()  # a right that goes with the user
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    drop_privileges()


def _drop_bounding_set() -> None:
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # beyond the last one this kernel knows


def set_seccomp_filter(program: bytes) -> None:
    """Install a filter, a `struct sock_fprog`, for this process and its descendants."""
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "prctl(PR_SET_SECCOMP)")


def enter_namespaces(pid: int, *, own_network: bool = True) -> None:
    """Join all namespaces of `pid` at once (Linux 5.8); only children enter its process namespace.

    Args:
        own_network: false when `pid` is in this process's network namespace already.
    """
    fd = os.pidfd_open(pid)
    try:
        setns(fd, ALL_NAMESPACES if own_network else ALL_NAMESPACES & ~CLONE_NEWNET)
    finally:
        os.close(fd)
