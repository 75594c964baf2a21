"""Hands out the sandboxes of any provider: bounded, at a bounded rate, timed, with a deadline on everything.

Invariants: at most `sandbox.concurrency` are in use at once; every start was let through by the breaker; a
sandbox is handed out once, a warm one too; when `close` returns, none is left. A provider that hangs is an
error of the operation it hangs in (`Leased`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from legorl.config.schema import SandboxConfig
from legorl.errors import InfrastructureError, SandboxStartError, SetupDeadlineError
from legorl.sandbox.base import Sandbox, SandboxProvider, SandboxSpec
from legorl.sandbox.breaker import Breaker
from legorl.sandbox.leased import STOP_S, Leased
from legorl.sandbox.rate import RateLimit
from legorl.sandbox.timing import OperationStats, Timings

START_GRACE_S = 5.0
"""A provider keeps `start_timeout_s` itself; this is for one that does not."""
_WARM_KEPT_S = 60.0
"""A warm sandbox that nobody wanted for so long makes room for one of another kind."""


@dataclass(frozen=True)
class PoolStats:
    """What a pool did so far."""

    in_use: int
    warm: int
    warm_used: int
    """Starts that were served by a warm one."""
    breaker: str
    operations: dict[str, OperationStats]


@dataclass(frozen=True)
class _Warm:
    kind: str
    sandbox: Sandbox
    since: float


class SandboxPool:
    """See the module. A `SandboxProvider` itself; use it from one event loop."""

    def __init__(self, provider: SandboxProvider, config: SandboxConfig) -> None:
        """`provider` is the pool's from now on: `close` closes it."""
        self._provider, self._config = provider, config
        self.name, self.policy = provider.name, provider.policy
        self.breaker = Breaker(config.pool)
        self._timings = Timings()
        self._places = asyncio.Semaphore(config.concurrency)
        self._rate = RateLimit(config.pool.starts_per_s)
        self._in_use = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._warm: list[_Warm] = []
        self._warming: set[asyncio.Task[None]] = set()
        self._warm_used = 0
        self._serial = itertools.count(1)
        self._closed = False

    @property
    def limits_by(self) -> str:
        """The provider's."""
        return self._provider.limits_by

    def stats(self) -> PoolStats:
        """Until now."""
        return PoolStats(
            self._in_use, len(self._warm), self._warm_used, self.breaker.state, self._timings.stats()
        )

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """See `SandboxProvider`. Waits for its turn first, at most `sandbox.pool.queue_timeout_s`.

        Raises:
            OutageError: the breaker has given up.
            SandboxStartError, SetupDeadlineError: no turn in time, or the provider failed.
        """
        async with self._turn(spec) as probe:
            try:
                inner = self._take_warm(spec) or await self._start(spec)
            except BaseException as error:
                if probe and isinstance(error, InfrastructureError):
                    self.breaker.probed(False, error.cause, str(error))
                elif probe:
                    self.breaker.probed(None)
                raise
            if probe:
                self.breaker.probed(True)
            self._in_use += 1
            self._idle.clear()
        self._warm_up(spec)
        return Leased(inner, self._timings, self._config.transfer_timeout_s, self._gave_back)

    @contextlib.asynccontextmanager
    async def _turn(self, spec: SandboxSpec) -> AsyncIterator[bool]:
        """A place, which is kept if the body does not raise; whether this start is the breaker's probe."""
        began, wait_s = time.monotonic(), self._config.pool.queue_timeout_s
        probe = placed = False
        try:
            async with asyncio.timeout(wait_s):
                probe = await self.breaker.admit()
                await self._places.acquire()
                placed = True
                await self._rate.take()
            if self._closed:
                raise SandboxStartError(f"{spec.trial_id}: the pool is closed.")
        except BaseException as error:
            if placed:
                self._places.release()
            if probe:
                self.breaker.probed(None)
            if isinstance(error, TimeoutError):
                raise SandboxStartError(
                    f"{spec.trial_id}: no turn to start after {wait_s:g} s ({self._in_use} in use, breaker "
                    f"{self.breaker.state}); raise sandbox.pool.queue_timeout_s or sandbox.concurrency."
                ) from error
            raise
        self._timings.add("queue", time.monotonic() - began)
        try:
            yield probe
        except BaseException:
            self._places.release()
            raise

    async def _start(self, spec: SandboxSpec) -> Sandbox:
        limit = spec.start_timeout_s + START_GRACE_S
        deadline = asyncio.timeout(limit)
        with self._timings.timed("start"):
            try:
                async with deadline:
                    return await self._provider.start(spec)
            except TimeoutError as error:
                if deadline.expired():
                    raise SetupDeadlineError(
                        f"{spec.trial_id}: the start of a {self.name} sandbox took longer than {limit:g} s."
                    ) from error
                raise

    def _gave_back(self) -> None:
        self._in_use -= 1
        self._places.release()
        if not self._in_use:
            self._idle.set()

    def _take_warm(self, spec: SandboxSpec) -> Sandbox | None:
        kind = _kind(spec)
        for warm in self._warm:
            if warm.kind == kind:
                self._warm.remove(warm)
                self._warm_used += 1
                return warm.sandbox
        return None

    def _warm_up(self, spec: SandboxSpec) -> None:
        """Start one more of the kind that was just wanted, if there is room for it."""
        most = self._config.pool.warm
        if not most or self._closed or self.breaker.state != "closed":
            return
        if len(self._warm) + len(self._warming) >= most:
            oldest = min(self._warm, key=lambda warm: warm.since, default=None)
            if oldest is None or time.monotonic() - oldest.since < _WARM_KEPT_S:
                return
            self._warm.remove(oldest)
            self._keep(self._end(oldest.sandbox))
        self._keep(self._add_warm(spec))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _add_warm(self, spec: SandboxSpec) -> None:
        name = f"{spec.trial_id}-warm{next(self._serial)}"
        with contextlib.suppress(InfrastructureError):  # counted; whoever starts next meets it himself
            await self._rate.take()
            sandbox = await self._start(dataclasses.replace(spec, trial_id=name))
            if self._closed:
                await self._end(sandbox)
            else:
                self._warm.append(_Warm(_kind(spec), sandbox, time.monotonic()))

    async def _end(self, sandbox: Sandbox) -> None:
        with contextlib.suppress(InfrastructureError, TimeoutError), self._timings.timed("stop"):
            await asyncio.wait_for(sandbox.stop(), STOP_S)

    async def close(self) -> None:
        """Refuse new starts, wait for the sandboxes in use, then end everything."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._config.pool.drain_s)
        for task in list(self._warming):
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        warm, self._warm = self._warm, []
        await asyncio.gather(*(self._end(each.sandbox) for each in warm))
        await self._provider.close()


def _kind(spec: SandboxSpec) -> str:
    """What two specs have in common that one warm sandbox can serve."""
    return repr(dataclasses.replace(spec, trial_id=""))
