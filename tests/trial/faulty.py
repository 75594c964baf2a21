"""Faults for whole trials on any provider: which operation of which sandbox fails, and as what that counts.

`FaultyProvider` wraps a real provider. What a provider alone can know (a server's 5xx, a dropped connection)
is raised in its place, while a sandbox of its own runs; kills, hangs and full disks are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.errors import (
    InfrastructureError,
    IntegrityError,
    SandboxExecError,
    SandboxStartError,
    TransferError,
)
from legorl.sandbox.base import (
    WORKDIR,
    ExecResult,
    Phase,
    ProxyEndpoint,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)

Kill = Callable[[Sandbox], Awaitable[None]]
"""Ends a sandbox by force, from outside."""


@dataclass(frozen=True)
class Fault:
    """One way to fail."""

    operation: str
    """create, ready, exec, put, get, connect_proxy, set_phase, snapshot; or the policy's: engine."""
    cause: str
    """What the trial's record must say."""
    how: str = "raise"
    """raise, drop (after the work began), hang, kill (the sandbox), fill (its disk)."""
    verify: bool = False
    """In the grading sandbox instead of the agent's."""
    phase: str = "agent"
    """In which phase the trial must end."""
    message: str = ""
    task: str = "fixable"
    """Which of the test's tasks it needs."""


FAULTS: Mapping[str, Fault] = {
    "create": Fault("create", "sandbox_start", phase="setup"),
    "create, API 503": Fault("create", "sandbox_start", phase="setup", message="503 Service Unavailable"),
    "ready": Fault("ready", "sandbox_start", phase="setup"),
    "ready, hung": Fault("ready", "setup_deadline", "hang", phase="setup"),
    "proxy": Fault("connect_proxy", "integrity", phase="setup"),
    "sealing": Fault("set_phase", "integrity", phase="setup"),
    "upload": Fault("put", "transfer"),
    "upload, disk full": Fault("put", "transfer", "fill"),
    "exec": Fault("exec", "sandbox_exec"),
    "exec, websocket dropped": Fault("exec", "sandbox_exec", "drop", message="connection closed"),
    "exec, hung": Fault("exec", "sandbox_exec", "hang"),
    "sandbox killed": Fault("exec", "sandbox_exec", "kill"),
    "engine": Fault("engine", "engine", message="500 Internal Server Error", task="engine"),
    "download": Fault("get", "transfer"),
    "download, hung": Fault("get", "transfer", "hang"),
    "snapshot": Fault("snapshot", "transfer"),
    "verifier's create": Fault("create", "sandbox_start", verify=True, phase="verify"),
    "verifier's upload": Fault("put", "transfer", verify=True, phase="verify"),
    "verifier's exec": Fault("exec", "sandbox_exec", "drop", verify=True, phase="verify"),
    "verifier's exec, hung": Fault("exec", "sandbox_exec", "hang", verify=True, phase="verify"),
    "verifier's sandbox killed": Fault("exec", "sandbox_exec", "kill", verify=True, phase="verify"),
    "verifier": Fault("none", "verifier", verify=True, phase="verify", task="broken verifier"),
}
_ERRORS: Mapping[str, type[InfrastructureError]] = {
    "create": SandboxStartError,
    "ready": SandboxStartError,
    "exec": SandboxExecError,
    "put": TransferError,
    "get": TransferError,
    "snapshot": TransferError,
    "connect_proxy": IntegrityError,
    "set_phase": IntegrityError,
}
_FOR_EVER_S = 3600.0


async def kill_init(sandbox: Sandbox) -> None:
    """`kill -9` of the sandbox's first process, on this machine."""
    pid = sandbox.init_pid
    if pid is None:  # an engine's container: its process namespace tells which
        seen = await sandbox.exec(["readlink", "/proc/self/ns/pid"], timeout_s=20)
        pid = await asyncio.to_thread(_first_process, seen.stdout.decode().strip())
    os.kill(pid, signal.SIGKILL)


def _first_process(namespace: str) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if str((entry / "ns" / "pid").readlink()) == namespace:
                    (inner,) = re.findall(r"^NSpid:.*\b(\d+)$", (entry / "status").read_text(), re.M)
                    if inner == "1":
                        return int(entry.name)
    raise LookupError(f"no first process in {namespace}")


class FaultySandbox:
    """One sandbox, and the fault that it is to meet."""

    def __init__(self, inner: Sandbox, fault: Fault | None, kill: Kill) -> None:
        self.inner, self.fault, self.kill = inner, fault, kill
        if hasattr(inner, "put_many"):
            self.put_many = self._put_many

    @property
    def init_pid(self) -> int | None:
        return self.inner.init_pid

    async def _meet(self, operation: str, work: Callable[[], Awaitable[Any]]) -> Any:
        fault = self.fault
        if fault is None or fault.operation != operation:
            return await work()
        error = _ERRORS[operation](fault.message or f"injected at {operation}")
        match fault.how:
            case "raise":
                raise error
            case "hang":
                await asyncio.sleep(_FOR_EVER_S)
            case "fill":
                size = "head -c 64M /dev/zero >/tmp/fill; true"
                await self.inner.exec(["bash", "-c", size], timeout_s=20)
                return await work()
            case _:
                running = asyncio.ensure_future(work())
                await asyncio.sleep(0.02)
                if fault.how == "kill":
                    await self.kill(self.inner)
                    return await running
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise error

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        stdin: bytes = b"",
    ) -> ExecResult:
        # A command that waits, so that a kill or a drop always comes while it runs.
        slow = self.fault is not None and self.fault.how in ("kill", "drop")
        wanted = ["bash", "-c", 'sleep 0.3; exec "$@"', "-", *argv] if slow else argv
        return await self._meet(  # type: ignore[no-any-return]
            "exec", lambda: self.inner.exec(wanted, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin)
        )

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._meet("put", lambda: self.inner.put(path, data, mode))

    async def _put_many(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        await self._meet("put", lambda: self.inner.put_many(files))  # type: ignore[attr-defined]

    async def get(self, path: str) -> bytes:
        return await self._meet("get", lambda: self.inner.get(path))  # type: ignore[no-any-return]

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        return await self._meet("connect_proxy", lambda: self.inner.connect_proxy(proxy))  # type: ignore[no-any-return]

    async def set_phase(self, phase: Phase) -> None:
        await self._meet("set_phase", lambda: self.inner.set_phase(phase))

    async def snapshot(self) -> Any:
        return await self._meet("snapshot", self.inner.snapshot)

    async def stop(self) -> None:
        await self.inner.stop()


class FaultyProvider:
    """A provider whose sandboxes fail as `plan` says for their trial; retries meet the same fault again."""

    def __init__(self, inner: SandboxProvider, plan: Mapping[str, Fault], kill: Kill = kill_init) -> None:
        self.inner, self.plan, self.kill = inner, plan, kill
        self.name, self.policy = inner.name, inner.policy
        self.starts = 0

    @property
    def limits_by(self) -> str:
        return self.inner.limits_by

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.starts += 1
        verify = spec.trial_id.endswith("-verify")
        fault = self.plan.get(spec.trial_id.removesuffix("-verify"))
        fault = fault if fault is not None and fault.verify is verify else None
        if fault is not None and fault.operation == "create":
            raise SandboxStartError(fault.message or "injected at create")
        if fault is not None and fault.how == "fill":
            spec = dataclasses.replace(spec, limits=dataclasses.replace(spec.limits, disk_mb=4))
        sandbox = await self.inner.start(spec)
        if fault is not None and fault.operation == "ready":
            try:
                if fault.how == "hang":
                    await asyncio.sleep(_FOR_EVER_S)
                raise SandboxStartError("injected: never ready")
            finally:
                with contextlib.suppress(InfrastructureError):
                    await sandbox.stop()
        return FaultySandbox(sandbox, fault, self.kill)

    async def close(self) -> None:
        await self.inner.close()
