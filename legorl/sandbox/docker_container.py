"""From a spec and a policy to the container that the engine is asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl.sandbox.base import CACHE, CACHE_ENV, WORKDIR, SandboxSpec
from legorl.sandbox.inside_link import bootstrap
from legorl.sandbox.layout import AGENT_ENV, HOME, IMAGE_PATH, UID
from legorl.sandbox.policy import Policy

WRITABLE: Mapping[str, str] = {
    WORKDIR: f"mode=0755,uid={UID},gid={UID}",
    HOME: f"mode=0755,uid={UID},gid={UID}",
    "/logs": f"mode=0755,uid={UID},gid={UID}",
    CACHE: f"mode=0755,uid={UID},gid={UID}",
    "/tmp": "mode=1777",
}
"""Where a sandbox can write -> options of the tmpfs there."""
HOST = "/host"
"""Where the machine is seen while the rule `host_invisible` is off."""
_INODES_PER_MB = 256
_OWN_PIDS = 4
"""Processes of ours in the container: PID 1 and keepers of commands."""
_OWN_MB = 48
"""Memory of those."""
_INIT_CAPABILITIES = ("KILL", "SETGID", "SETUID")
"""Of PID 1 alone: to become the agent, and to end its processes."""
_ABLATION_CAPABILITIES = ("DAC_READ_SEARCH", "NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE")
"""With Docker's own, what commands have while the rule `no_privileges` is off."""


def environment() -> dict[str, str]:
    """What commands find in their environment unless the image, the spec or the command has it."""
    return {"PATH": IMAGE_PATH, **AGENT_ENV, **CACHE_ENV}


def python_mount(python: str) -> tuple[str, Path | None]:
    """The Python that runs PID 1, and the directory to mount for it.

    Args:
        python: `sandbox.docker.python`; empty for this program's own.
    """
    if python:
        return python, None
    prefix = Path(sys.base_prefix)
    if prefix.is_relative_to("/usr") and prefix != Path("/usr/local"):
        return "python3", None  # a system's Python is not one directory; the image has its own
    return str(prefix / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"), prefix


def container(
    spec: SandboxSpec,
    policy: Policy,
    image: str,
    labels: Mapping[str, str],
    python: str,
    *,
    podman: bool = False,
) -> dict[str, Any]:
    """The body of the engine's `POST /containers/create`."""
    program, prefix = python_mount(python)
    privileged = not policy.holds("no_privileges")
    uid = 0 if privileged else UID
    return {
        "Image": image,
        "Labels": dict(labels),
        **({"Hostname": "sandbox"} if policy.holds("network_closed") else {}),
        "User": "0:0",  # PID 1's; commands are the agent's (`inside/commands.py`)
        "WorkingDir": "/",
        "Entrypoint": [program],
        "Cmd": bootstrap(uid, uid, [*_places(spec)] if podman else ()),
        "Healthcheck": {"Test": ["NONE"]},
        # The attached stream is a lease: when its other end goes, PID 1's input ends, and so does PID 1.
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "HostConfig": {
            "AutoRemove": True,
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
            "ReadonlyRootfs": True,
            "NetworkMode": "none" if policy.holds("network_closed") else "host",
            "Mounts": _mounts(spec, policy, prefix),
            **_space(spec, limited=policy.holds("limits"), podman=podman),
            **_privileges(privileged, podman=podman),
        },
    }


def _mounts(spec: SandboxSpec, policy: Policy, prefix: Path | None) -> list[dict[str, Any]]:
    read_only = policy.holds("runtime_read_only")
    mounts = [_bind(item.source.resolve(), item.target, read_only) for item in spec.mounts]
    if prefix is not None and all(item.target != str(prefix) for item in spec.mounts):
        mounts.insert(0, _bind(prefix, str(prefix), read_only=True))
    if not policy.holds("host_invisible"):
        mounts.append(_bind(Path("/"), HOST, read_only=True))
    return mounts


def _bind(source: Path, target: str, read_only: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}


def _places(spec: SandboxSpec) -> dict[str, str]:
    """Where it can be written -> options of the tmpfs there."""
    return {**WRITABLE, **dict.fromkeys(spec.directories, WRITABLE[HOME])}


def _space(spec: SandboxSpec, *, limited: bool, podman: bool) -> dict[str, Any]:
    """Memory, processes and disk. The memory limit includes the disk, which is memory too."""
    limits, places = spec.limits, _places(spec)
    size = f"size={limits.disk_mb}m," if limited else ""
    if podman:  # it knows neither owners nor numbers of files; PID 1 makes the agent the owner
        places = dict.fromkeys(places, "mode=1777")
    elif limited:
        size += f"nr_inodes={limits.disk_mb * _INODES_PER_MB},"
    tmpfs = {path: f"rw,exec,nosuid,nodev,{size}{options}" for path, options in places.items()}
    if not limited:
        return {"Tmpfs": tmpfs}
    memory = (limits.memory_mb + limits.disk_mb + _OWN_MB) << 20
    return {
        "Tmpfs": tmpfs,
        "ShmSize": limits.disk_mb << 20,
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids + _OWN_PIDS,
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
    }


def _privileges(privileged: bool, *, podman: bool) -> dict[str, Any]:
    if privileged:
        return {
            "CapAdd": list(_ABLATION_CAPABILITIES),
            "SecurityOpt": ["seccomp=unconfined", "apparmor=unconfined"],
        }
    return {
        "CapDrop": ["ALL"],
        "CapAdd": [*_INIT_CAPABILITIES, *(("CHOWN",) if podman else ())],
        "SecurityOpt": ["no-new-privileges"],
    }
