"""What a sandbox is: a place where one trial's commands run, apart from everything else.

Invariants: every wait has a deadline; `stop` leaves no process, mount, namespace or file behind and may
be called on any path, more than once; a failure of the sandbox itself is an `InfrastructureError`, while a
command that exits non-zero is an `ExecResult`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the launcher of local sandboxes reads this module with the standard library alone
    from legorl.sandbox.policy import Policy

WORKDIR = "/workspace"
"""Where the task's repository lies in every sandbox."""

CACHE = "/cache"
"""Where pip and uv keep what they downloaded: in memory, within the disk's limit, gone with the sandbox."""
CACHE_ENV = {"PIP_CACHE_DIR": f"{CACHE}/pip", "UV_CACHE_DIR": f"{CACHE}/uv"}

PROXY_PORT = 8377
"""Port of the proxy on the sandbox's own loopback; each sandbox has its own network namespace."""


class Phase(StrEnum):
    """Phases of a trial as the sandbox sees them."""

    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"


@dataclass(frozen=True)
class Mount:
    """A directory or file of the host, visible read-only in the sandbox at `target`."""

    source: Path
    target: str


@dataclass(frozen=True)
class Limits:
    """Resources of one sandbox."""

    memory_mb: int = 1024
    pids: int = 256
    disk_mb: int = 256
    """Writable space of workspace, /tmp and home together (they live in memory)."""
    output_bytes: int = 4_000_000
    """Standard output or error of one command beyond this is cut in the middle, and says so."""


@dataclass(frozen=True)
class SandboxSpec:
    """What to start."""

    trial_id: str
    workspace: Path
    """Pristine repository on the host; never written to (it is the lower layer)."""
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    start_timeout_s: float = 30.0
    image: str = ""
    """What the provider makes the root file system of; empty: its own default."""
    directories: tuple[str, ...] = ()
    """Absolute paths of further empty directories that commands may write to: grading in place puts tests
    into one. A provider whose root can be written need not make them."""


@dataclass(frozen=True)
class ExecResult:
    """How a command ended. `code` is the exit status, 128+n for signal n; `timed_out` sets code 124."""

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True)
class Snapshot:
    """What the agent left: changed files relative to the workspace, as a unified patch and as contents."""

    changed: Mapping[str, bytes | None]
    """Path relative to the workspace -> new contents, None where the file was deleted."""
    modes: Mapping[str, int]
    """Path -> permission bits, for every path of `changed` that is not deleted; for a symbolic link, whose
    contents are its target, the whole mode (S_IFLNK | 0o777)."""
    patch: str
    """`git apply`-able unified diff against the pristine workspace (binary files included)."""
    skipped: tuple[str, ...] = ()
    """Paths left out: special files, and files beyond the size limits, which count as unchanged."""


class Rules(Protocol):
    """The integrity policy as a sandbox asks it."""

    def holds(self, rule: str) -> bool:
        """Whether the rule is to be applied."""


class ProxyEndpoint(Protocol):
    """The proxy as a sandbox sees it."""

    async def attach(self, sock: socket.socket) -> None:
        """Serve on this listening socket too. The proxy owns it until `detach`."""

    async def detach(self, sock: socket.socket) -> None:
        """Stop serving on the socket and close it."""


class Sandbox(Protocol):
    """One running sandbox."""

    @property
    def init_pid(self) -> int | None:
        """Host pid of a process inside the sandbox's namespaces, None where there is none."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command; its whole process tree is gone when this returns. `env` is added to the spec's.

        Raises:
            SandboxExecError: the command could not be started, or the sandbox is gone.
        """

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file, creating its directories. Raises `TransferError`."""

    async def get(self, path: str) -> bytes:
        """Read a file. Raises `TransferError` (also when it does not exist)."""

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        """Make the proxy, and nothing else, reachable; returns the base URL as seen from inside."""

    async def set_phase(self, phase: Phase) -> None:
        """Enter a phase; the policy's rules for it hold when this returns. Raises `IntegrityError`."""

    async def snapshot(self) -> Snapshot:
        """What changed in the workspace. Taken from outside: nothing in the sandbox is trusted."""

    async def stop(self) -> None:
        """End everything. Never raises for what is already gone."""


class SandboxProvider(Protocol):
    """Starts sandboxes."""

    name: str
    policy: Policy
    """The integrity policy that its sandboxes keep."""

    @property
    def limits_by(self) -> str:
        """What enforces memory and process limits."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start one. Raises `SandboxStartError`, and leaves nothing behind when it does."""

    async def close(self) -> None:
        """Stop every sandbox this provider started."""
