"""What a sandbox's file system looks like: from a spec to bubblewrap's arguments.

Invariant: the host is visible read-only and only in part: system programs, the Python installation, the
mounts of the spec. Everything writable lies on one size-limited tmpfs of the sandbox's own mount namespace.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from legorl.sandbox import linux
from legorl.sandbox.base import CACHE, CACHE_ENV, WORKDIR, SandboxSpec

STAGE = "/sys/kernel"
"""Where the launcher mounts, in its own mount namespace, what all its sandboxes share: a directory that every
Linux host has, that no workspace lies below and that no step of a start reads."""
BOX = f"{STAGE}/box"
"""Where a supervisor mounts the tmpfs of one sandbox."""
UID = 1000
HOME = "/home/agent"
INIT = "/.init"
IMAGE_INIT = "/.init/sleep"
IMAGES = f"{STAGE}/images"
HOST = "/host"
"""Where the host's root is seen when the rule `host_invisible` is off."""

WRITABLE: Mapping[str, str] = {
    "workspace": WORKDIR,
    "home": HOME,
    "tmp": "/tmp",
    "shm": "/dev/shm",
    "logs": "/logs",
    "cache": CACHE,
}
"""Directory below `BOX` -> where it is seen."""
ETC_FILES: Mapping[str, str] = {
    "passwd": f"root:x:0:0::/nonexistent:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
ETC_COPIES = ("ld.so.cache", "localtime", "mime.types", "os-release")
_ETC_DIRECTORIES = ("alternatives", "ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")
"""Of the host's /etc: what programs need and what says nothing about the host (no keys, no accounts)."""
_PYTHON = "/opt/python/bin"
"""Holds `python`, which some systems have under the name `python3` only."""
AGENT_ENV: Mapping[str, str] = {
    "HOME": HOME,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
    # Byte code is matched to its source by size and whole seconds: an agent that turns `<` into `>`
    # within a second of its last test run would go on testing the old code.
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""What commands of every provider's sandboxes have in their environment."""
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ACCOUNTS_BYTES = 1 << 20
_TREES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def environment(extra: Mapping[str, str], *, image: bool = False) -> dict[str, str]:
    """Environment of every command: a fixed base, then the spec's variables.

    Args:
        image: the root directory is an image's.
    """
    host_path = f"{_PYTHON}:{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {"PATH": IMAGE_PATH if image else host_path, **AGENT_ENV, **CACHE_ENV, **extra}


def writable(spec: SandboxSpec) -> dict[str, str]:
    """`WRITABLE` and the spec's own empty directories."""
    return {**WRITABLE, **{f"extra{number}": path for number, path in enumerate(spec.directories)}}


def bubblewrap_arguments(
    spec: SandboxSpec, off: frozenset[str] = frozenset(), *, image: bool = False
) -> list[str]:
    """Arguments after `bwrap`, without the command. The order matters: later mounts lie on earlier ones.

    Args:
        off: rules of the integrity policy that are switched off.
        image: the root directory is an image's, which `stage.build` has put together.
    """
    arguments = [*(_image_arguments(off) if image else _host_arguments(off))]
    for source, target in writable(spec).items():
        arguments += ["--bind", f"{BOX}/{source}", target]
    bind = "--bind" if "runtime_read_only" in off else "--ro-bind"
    for item in spec.mounts:
        arguments += [bind, str(item.source), item.target]
    if "host_invisible" in off:
        arguments += ["--ro-bind", "/", HOST]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKDIR]


def _namespaces(off: frozenset[str]) -> list[str]:
    """Own namespaces, and what commands may do in them."""
    rights = ["--disable-userns", "--uid", str(UID), "--gid", str(UID), "--cap-drop", "ALL"]
    if "no_privileges" in off:
        rights = ["--uid", "0", "--gid", "0"]
    network = [] if "network_closed" in off else ["--unshare-net"]
    return [
        *("--unshare-user", *rights, *network),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
        *("--hostname", "sandbox"),
    ]


def _system_arguments() -> list[str]:
    """/proc without the kernel's settings, and /dev."""
    arguments = ["--proc", "/proc"]
    for path in _kernel_settings():
        arguments += ["--ro-bind", str(path) if path.is_dir() else "/dev/null", str(path)]
    return [*arguments, "--dev", "/dev"]


@functools.cache
def _image_arguments(off: frozenset[str]) -> tuple[str, ...]:
    # A Python below /usr would hide the image's own; harnesses then need one in the image.
    python = [] if Path(sys.base_prefix).is_relative_to("/usr") else _python()
    return (*_namespaces(off), "--bind", f"{BOX}/root", "/", *python, *_system_arguments())


def _python() -> list[str]:
    """The Python that harnesses are made for, unless it is among the system's programs."""
    prefix = Path(sys.base_prefix)
    bind = [] if prefix.is_relative_to("/usr") else ["--ro-bind", str(prefix), str(prefix)]
    # Packages installed beside it are the host's, and their .pth files slow every start.
    site = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    return [*bind, "--tmpfs", site, "--remount-ro", site] if Path(site).is_dir() else bind


@functools.cache
def _host_arguments(off: frozenset[str]) -> tuple[str, ...]:
    """Those that are the same for every sandbox on this host."""
    arguments = [*_namespaces(off), "--ro-bind", "/usr", "/usr"]
    for tree in _TREES:
        if Path(tree).is_symlink():
            arguments += ["--symlink", str(Path(tree).readlink()), tree]
        elif Path(tree).is_dir():
            arguments += ["--ro-bind", tree, tree]
    arguments += ["--ro-bind", f"{STAGE}/etc", "/etc"]
    for name in etc_directories():
        arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    arguments += _python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    arguments += ["--symlink", f"{sys.base_prefix}/bin/{version}", f"{_PYTHON}/python"]
    return (*arguments, *_system_arguments(), "--ro-bind", f"{STAGE}/init", INIT)


def image_place(serial: int) -> str:
    """Where `lazy_server` mounts: `file` with the image, `root` with what is in it."""
    return f"{IMAGES}/{serial}"


def image_etc(image: str) -> dict[str, str]:
    """Files of /etc that an image gets: our own, and its accounts with the agent's among them."""
    files = {name: ETC_FILES[name] for name in ("hosts", "hostname", "resolv.conf")}
    for name in ("passwd", "group"):
        try:
            fd = linux.open_in_root(image, f"etc/{name}", os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(fd, encoding="utf-8", errors="surrogateescape") as stream:
                own = stream.read(_ACCOUNTS_BYTES).rstrip("\n").splitlines()
        except FileNotFoundError:
            own = ETC_FILES[name].splitlines()[:1]
        own = [line for line in own if line.split(":")[2:3] != [str(UID)] and not line.startswith("agent:")]
        files[name] = "\n".join([*own, ETC_FILES[name].splitlines()[1]]) + "\n"
    return files


def etc_directories() -> list[str]:
    """Directories of the host's /etc that a sandbox sees."""
    return [name for name in _ETC_DIRECTORIES if Path("/etc", name).is_dir()]


def _kernel_settings() -> list[Path]:
    """Entries of /proc that hold something root may write: settings of the kernel and of drivers.

    When the host user is root, ownership alone would let a command write many of them; without root, none.
    """
    if os.geteuid() != 0:
        return []
    found = []
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdecimal() or entry.is_symlink():
            continue
        files = (Path(top, name) for top, _, names in os.walk(entry) for name in names)
        if any(_owner_may_write(file) for file in (files if entry.is_dir() else [entry])):
            found.append(entry)
    return found


def _owner_may_write(path: Path) -> bool:
    try:
        return bool(path.lstat().st_mode & stat.S_IWUSR)
    except OSError:
        return False


def opaque_attribute(*, privileged: bool) -> str:
    """With what overlayfs marks a directory that hides the one below it."""
    return "trusted.overlay.opaque" if privileged else "user.overlay.opaque"
