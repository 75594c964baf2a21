"""Deadlines and timing of a trial's phases, and what an exception means for the trial.

Invariant: every wait of a trial happens inside a phase, so it has a deadline and is timed; clean-up runs to
its end (or its own deadline) even when the trial is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from legorl.errors import InfrastructureError, SetupDeadlineError
from legorl.harness.base import Outcome

T = TypeVar("T")


@dataclass
class PhaseClock:
    """Seconds spent in each phase so far, and the deadlines."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time something that has its deadlines within."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    @asynccontextmanager
    async def phase(self, name: str, deadline_s: float) -> AsyncIterator[None]:
        """Time a phase and bound it.

        Raises:
            SetupDeadlineError: the deadline passed. A `TimeoutError` from within passes unchanged.
        """
        deadline = asyncio.timeout(deadline_s)
        try:
            with self.timed(name):
                async with deadline:
                    yield
        except TimeoutError as error:
            if deadline.expired():
                raise SetupDeadlineError(f"Phase {name} took longer than {deadline_s:g} s.") from error
            raise

    async def cleanup(self, name: str, work: Awaitable[T], deadline_s: float) -> T:
        """`to_the_end`, timed as phase `name`."""
        with self.timed(name):
            return await to_the_end(work, deadline_s)


async def to_the_end(work: Awaitable[T], deadline_s: float) -> T:
    """Await `work` even when cancelled meanwhile; the cancellation is delivered afterwards.

    Raises:
        SetupDeadlineError: the deadline passed; `work` was cancelled.
    """
    task = asyncio.ensure_future(asyncio.wait_for(work, deadline_s))
    try:
        return await asyncio.shield(task)
    except TimeoutError as error:
        raise SetupDeadlineError(f"Clean-up took longer than {deadline_s:g} s.") from error
    except asyncio.CancelledError:
        if not task.done():
            with suppress(Exception):
                await task
        raise


def ending_of(error: Exception) -> Outcome:
    """The termination that an exception stands for (I5: never one of the policy's own ends)."""
    if isinstance(error, InfrastructureError):
        return Outcome(error.cause, str(error))
    if isinstance(error, TimeoutError):
        return Outcome("setup_deadline", f"A wait without a phase of its own timed out: {error}")
    return Outcome("infrastructure", f"{type(error).__name__}: {error}")
