"""Several engines behind one `TokenEngine`.

Invariants: a request is answered by at most one engine: it goes to another one only while none has taken
it (`EngineDownError`). A request in flight on an engine that dies ends with `EngineLostError`, which
excludes its trial as infrastructure. An engine that is out of rotation gets health checks and nothing else
until it passes one and samples a token.

The first request of a trial goes to the engine with the least to do, the later ones after it, for their
prefix is cached there. When that engine is out they go to another, and stay.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from legorl.engine.assemble import aborted
from legorl.engine.base import Sample, Sampling, TokenEngine
from legorl.errors import EngineDownError, EngineError, EngineLostError

TRIALS_REMEMBERED = 65536
"""Stickiness of the trials that were heard of last."""
PATIENCE = 3
"""Failures in a row, of health checks or of requests, until an engine that takes connections is out."""
PROBE_TIMEOUT_S = 60.0
"""An engine that comes back must sample a token within this time."""


class CheckedEngine(TokenEngine, Protocol):
    """An engine that can be asked whether it lives."""

    @property
    def name(self) -> str:
        """For messages."""

    async def check(self) -> None:
        """Cheap: samples nothing.

        Raises:
            EngineDownError: it is dead.
            EngineError: it does not answer as it should.
        """


@dataclass(eq=False)
class _Member:
    engine: CheckedEngine
    flights: dict[str, asyncio.Task[Sample]] = field(default_factory=dict)
    """Requests in flight on it."""
    failures: int = 0
    """In a row, of health checks and of requests."""
    out: str = ""
    """Why it is out of rotation; empty when it is not."""


class Router:
    """See the module. It owns the engines: `close` closes them.

    Args:
        engines: at least one; all serve the same weights.
        check_every_s: time between two health checks of an engine.
    """

    def __init__(self, engines: Sequence[CheckedEngine], *, check_every_s: float = 5.0) -> None:
        if not engines:
            raise EngineError("A router needs at least one engine.")
        self._members = [_Member(engine) for engine in engines]
        self._check_every_s = check_every_s
        self._sticky: OrderedDict[str, _Member] = OrderedDict()
        self._trials: Counter[_Member] = Counter()
        """How many remembered trials each engine has."""
        self._watchers: list[asyncio.Task[None]] = []
        self._open: dict[str, bool] = {}
        """Requests that are not answered yet, on an engine or on the way to another; True: to be aborted."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        """See `TokenEngine.generate`.

        Raises:
            EngineLostError: the engine died meanwhile.
            EngineDownError: no engine is alive.
        """
        if request_id in self._open:
            raise EngineError(f"Request {request_id} is in flight already.")
        self._watch()
        self._open[request_id] = False
        try:
            return await self._route(request_id, prompt_ids, sampling, routed_from, sticky)
        finally:
            del self._open[request_id]

    async def _route(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        routed_from: int,
        sticky: str,
    ) -> Sample:
        while not self._open[request_id]:
            member = self._choose(sticky)
            work = member.engine.generate(
                request_id, prompt_ids, sampling, routed_from=routed_from, sticky=sticky
            )
            try:
                sample = await self._fly(member, request_id, work)
            except EngineDownError as error:
                member.out = str(error)  # for new requests; a health check decides about those in flight
                await self._check(member)
            except EngineLostError:
                raise
            except EngineError as error:
                await self._failed(member)
                if member.out:
                    raise _lost(member, request_id) from error
                raise
            else:
                member.failures = 0
                return sample
        return aborted(routed_from)

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`."""
        if request_id in self._open:
            self._open[request_id] = True
        await asyncio.sleep(0)  # a request that was handed over just now has reached its engine after this
        for member in self._members:
            if request_id in member.flights:
                await member.engine.abort(request_id)

    async def close(self) -> None:
        """Close all engines."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    async def _fly(self, member: _Member, request_id: str, work: Coroutine[Any, Any, Sample]) -> Sample:
        task = member.flights[request_id] = asyncio.create_task(work, name=request_id)
        try:
            await asyncio.wait({task})  # the engine has a deadline
            if task.cancelled():
                raise _lost(member, request_id)
            return task.result()
        finally:
            del member.flights[request_id]
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def _choose(self, sticky: str) -> _Member:
        """The engine for a trial's next request."""
        member = self._sticky.get(sticky) if sticky else None
        if member is None or member.out:
            alive = [other for other in self._members if not other.out]
            if not alive:
                why = "; ".join(member.out for member in self._members)
                raise EngineDownError(f"No engine is alive: {why}")
            member = min(alive, key=lambda other: (len(other.flights), self._trials[other]))
        if sticky:
            self._remember(sticky, member)
        return member

    def _remember(self, sticky: str, member: _Member) -> None:
        before = self._sticky.pop(sticky, None)
        if before is not None:
            self._trials[before] -= 1
        self._sticky[sticky] = member
        self._trials[member] += 1
        if len(self._sticky) > TRIALS_REMEMBERED:
            _, oldest = self._sticky.popitem(last=False)
            self._trials[oldest] -= 1

    def _watch(self) -> None:
        """Start the health checks, in the event loop of the first request."""
        if not self._watchers:
            self._watchers = [asyncio.create_task(self._watch_one(member)) for member in self._members]

    async def _watch_one(self, member: _Member) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            if await self._check(member) and member.out and await self._samples(member):
                member.failures, member.out = 0, ""

    async def _failed(self, member: _Member) -> None:
        """A request failed: was it the engine?"""
        if member.out or not await self._check(member):
            return
        member.failures += 1
        if member.failures >= PATIENCE:
            member.out = f"{member.engine.name} failed {member.failures} requests in a row"

    async def _check(self, member: _Member) -> bool:
        """Whether the engine is alive. When it is dead nothing in flight on it is waited for."""
        try:
            await member.engine.check()
        except EngineError as error:
            member.failures += 1
            if isinstance(error, EngineDownError) or member.failures >= PATIENCE:
                member.out = str(error)
                for task in member.flights.values():
                    task.cancel()
            return False
        return True

    async def _samples(self, member: _Member) -> bool:
        """Whether an engine that is up again has its weights and samples."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await member.engine.generate(f"probe-{id(member)}", [0], Sampling(max_tokens=1))
        except (TimeoutError, EngineError):
            return False
        return True


def _lost(member: _Member, request_id: str) -> EngineLostError:
    name = member.engine.name
    message = f"{name} died with request {request_id} in flight: {member.out}"
    return EngineLostError(message, engine=name, request_id=request_id)
