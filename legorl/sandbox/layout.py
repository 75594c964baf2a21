"""What a sandbox's file system looks like: pure functions from a spec to bubblewrap's arguments.

Invariant: the host is visible read-only and only in part: system programs, the Python installation, the
mounts of the spec. Everything writable lies on one size-limited tmpfs of the sandbox's own mount namespace.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from legorl.sandbox.base import WORKDIR, SandboxSpec

STAGE = "/sys"
"""Where the launcher mounts the tmpfs before bubblewrap runs: a directory that every Linux host has, that no
workspace lies below and that no step of the start reads."""
UPPER = f"{STAGE}/upper"
UID = 1000
HOME = "/home/agent"
INIT = "/.init"

_TREES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_KERNEL_TREES = ("/proc/sys", "/proc/fs")
_KERNEL_FILES = ("/proc/sysrq-trigger", "/proc/mtrr", "/proc/kcore", "/proc/kmsg", "/proc/keys")
"""Settings and memory of the kernel. When the host user is root, so is the owner of these files, and
ownership alone would let a command write some of them."""
ETC_COPIES = ("ld.so.cache", "localtime", "mime.types", "os-release")
ETC_DIRECTORIES = ("alternatives", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
"""Of the host's /etc: what programs need and what says nothing about the host (no keys, no accounts)."""
ETC_FILES: Mapping[str, str] = {
    "passwd": f"root:x:0:0::/nonexistent:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
"""Written by the launcher to `STAGE`/etc."""
WRITABLE: Mapping[str, str] = {
    f"{STAGE}/workspace": WORKDIR,
    f"{STAGE}/home": HOME,
    f"{STAGE}/tmp": "/tmp",
    f"{STAGE}/shm": "/dev/shm",
    f"{STAGE}/logs": "/logs",
    f"{STAGE}/tests": "/tests",
}


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of every command: a fixed base, then the spec's variables."""
    base = {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
    }
    return {**base, **extra}


def bubblewrap_arguments(spec: SandboxSpec) -> list[str]:
    """Arguments after `bwrap`, without the command. The order matters: later mounts lie on earlier ones."""
    arguments = [
        *("--unshare-user", "--disable-userns", "--uid", str(UID), "--gid", str(UID)),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for tree in _TREES:
        if Path(tree).is_symlink():
            arguments += ["--symlink", str(Path(tree).readlink()), tree]
        elif Path(tree).is_dir():
            arguments += ["--ro-bind", tree, tree]
    arguments += ["--ro-bind", f"{STAGE}/etc", "/etc"]
    for name in etc_directories():
        arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    arguments += ["--proc", "/proc"]
    for path in _KERNEL_TREES:
        if Path(path).is_dir():
            arguments += ["--ro-bind", path, path]
    for path in _KERNEL_FILES:
        if Path(path).exists():
            arguments += ["--ro-bind", "/dev/null", path]
    arguments += ["--dev", "/dev", "--ro-bind", f"{STAGE}/init", INIT]
    for source, target in WRITABLE.items():
        arguments += ["--bind", source, target]
    for item in spec.mounts:
        arguments += ["--ro-bind", str(item.source), item.target]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKDIR]


def etc_directories() -> list[str]:
    """Those of `ETC_DIRECTORIES` that this host has."""
    return [name for name in ETC_DIRECTORIES if Path("/etc", name).is_dir()]


def opaque_attribute(*, privileged: bool) -> str:
    """With what overlayfs marks a directory that hides the one below it."""
    return "trusted.overlay.opaque" if privileged else "user.overlay.opaque"
