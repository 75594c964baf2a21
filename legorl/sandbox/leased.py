"""A sandbox as the pool hands it out: every operation is timed, and has a deadline of the pool's own.

Invariant: an operation that the provider lets hang (a dropped connection, a node that is gone) ends as the
error of that operation, so it is never taken for the end of a command. `stop` gives the place back once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from legorl.errors import (
    InfrastructureError,
    IntegrityError,
    SandboxExecError,
    SetupDeadlineError,
    TransferError,
)
from legorl.sandbox.base import WORKDIR, ExecResult, Phase, ProxyEndpoint, Sandbox, Snapshot
from legorl.sandbox.snapshot import contained
from legorl.sandbox.timing import Timings

GRACE_S = 30.0
"""An operation that has not returned so long after its own deadline hangs."""
PHASE_S = 60.0
"""For a change of phase, which has no deadline of its own."""
STOP_S = 60.0


class Leased:
    """See the module. Whatever else the provider's sandbox can do (`join`, `put_many`) is here too."""

    def __init__(
        self, sandbox: Sandbox, timings: Timings, transfer_timeout_s: float, gave_back: Callable[[], None]
    ) -> None:
        self._sandbox = sandbox
        self._timings = timings
        self._transfer_s = transfer_timeout_s + GRACE_S
        self._gave_back: Callable[[], None] | None = gave_back
        # As attributes: what asks for a runtime-checkable protocol does not see `__getattr__`.
        for name in dir(sandbox):
            if not name.startswith("_") and not hasattr(type(self), name):
                value = getattr(sandbox, name)
                if callable(value) or name == "join":
                    setattr(self, name, value)

    @property
    def init_pid(self) -> int | None:
        """See `Sandbox`."""
        return self._sandbox.init_pid

    @contextlib.asynccontextmanager
    async def _bounded(
        self, name: str, limit_s: float, error: type[InfrastructureError]
    ) -> AsyncIterator[None]:
        deadline = asyncio.timeout(limit_s)
        with self._timings.timed(name):
            try:
                async with deadline:
                    yield
            except TimeoutError as late:
                if deadline.expired():
                    raise error(f"{name} in the sandbox did not return for {limit_s:g} s.") from late
                raise

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `Sandbox`."""
        async with self._bounded("exec", timeout_s + GRACE_S, SandboxExecError):
            return await self._sandbox.exec(argv, timeout_s=timeout_s, env=env, cwd=cwd, stdin=stdin)

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox`."""
        async with self._bounded("put", self._transfer_s, TransferError):
            await self._sandbox.put(path, data, mode)

    async def get(self, path: str) -> bytes:
        """See `Sandbox`."""
        async with self._bounded("get", self._transfer_s, TransferError):
            return await self._sandbox.get(path)

    async def connect_proxy(self, proxy: ProxyEndpoint) -> str:
        """See `Sandbox`."""
        async with self._bounded("connect", PHASE_S, IntegrityError):
            return await self._sandbox.connect_proxy(proxy)

    async def set_phase(self, phase: Phase) -> None:
        """See `Sandbox`."""
        async with self._bounded("set_phase", PHASE_S, IntegrityError):
            await self._sandbox.set_phase(phase)

    async def snapshot(self) -> Snapshot:
        """See `Sandbox`."""
        async with self._bounded("snapshot", self._transfer_s, TransferError):
            return contained(await self._sandbox.snapshot())

    async def stop(self) -> None:
        """See `Sandbox`."""
        try:
            async with self._bounded("stop", STOP_S, SetupDeadlineError):
                await self._sandbox.stop()
        finally:
            gave_back, self._gave_back = self._gave_back, None
            if gave_back is not None:
                gave_back()
