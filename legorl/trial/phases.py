"""Deadlines, timing and retries of a trial's phases, and what an exception means for the trial.

    setup   sealed workspace, sandbox, proxy      again in a fresh sandbox, `sandbox.retries` times
    agent   the harness works, its state is kept  once
    verify  grading in a sandbox of its own       again in a fresh sandbox, `sandbox.retries` times

Only what infrastructure ended is begun again, and of that only what another sandbox may not meet (`RETRIED`).
The agent phase is not: its tokens are sampled, and a second attempt would put two histories into one trial,
one of which must not train (I2, I4) and may have been ended by what the first did. Setup has sampled nothing,
and grading samples nothing: it depends on the snapshot alone, so it can be repeated without changing what is
graded. With `sandbox.verify=same` there is no second sandbox with the agent's state, so it is not repeated.

Invariant: every wait of a trial happens inside a phase, so it has a deadline and is timed; clean-up runs to
its end (or its own deadline) even when the trial is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from legorl.errors import InfrastructureError, SetupDeadlineError
from legorl.harness.base import Outcome
from legorl.proxy.session import Session
from legorl.trial.record import PhaseRecord
from legorl.trial.termination import RETRIED

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


class Watcher(Protocol):
    """Told of a trial as it goes; see `legorl.trial.story`."""

    def began(self, phase: str, attempt: int) -> None:
        """An attempt at a phase begins."""

    def failed(self, phase: str, cause: str, detail: str, *, again: bool) -> None:
        """Infrastructure ended it; `again` if another attempt follows."""

    def ended(self, record: PhaseRecord) -> None:
        """The phase is over."""

    def opened(self, session: Session) -> None:
        """The proxy's account of the trial is open; its ledger grows from now on."""


class PhaseLog:
    """Runs the phases of one trial and keeps their records."""

    def __init__(
        self, delay_s: float, report: Callable[[str, str], None], watcher: Watcher | None = None
    ) -> None:
        """
        Args:
            delay_s: pause before a second attempt, doubled for each further one.
            report: called with the cause and the message of every attempt, both empty for one that went well.
        """
        self.records: list[PhaseRecord] = []
        self._delay_s, self._report, self._watcher = delay_s, report, watcher

    async def run(
        self,
        name: str,
        work: Callable[[], Awaitable[T]],
        *,
        retries: int = 0,
        cause_of: Callable[[T], str] = lambda result: "",
    ) -> T:
        """Run a phase; `cause_of` says from its result how it ended (empty: it is done)."""
        start, retried = time.time(), list[str]()
        while True:
            if self._watcher is not None:
                self._watcher.began(name, len(retried) + 1)
            try:
                result = await work()
            except Exception as error:
                ending = ending_of(error)
                again = ending.termination in RETRIED and len(retried) < retries
                self._report(ending.termination, ending.detail)
                if self._watcher is not None:
                    self._watcher.failed(name, ending.termination, ending.detail, again=again)
                if not again:
                    self._keep(name, start, ending.termination, retried)
                    raise
                retried.append(ending.termination)
                await asyncio.sleep(self._delay_s * 2 ** (len(retried) - 1))
                continue
            self._report("", "")
            self._keep(name, start, cause_of(result), retried)
            return result

    def _keep(self, name: str, start: float, cause: str, retried: list[str]) -> None:
        record = PhaseRecord(name, start, time.time(), len(retried) + 1, cause, tuple(retried))
        self.records.append(record)
        if self._watcher is not None:
            self._watcher.ended(record)


def ending_of(error: Exception) -> Outcome:
    """The termination that an exception stands for (I5: never one of the policy's own ends)."""
    if isinstance(error, InfrastructureError):
        return Outcome(error.cause, str(error))
    if isinstance(error, TimeoutError):
        return Outcome("setup_deadline", f"A wait without a phase of its own timed out: {error}")
    return Outcome("infrastructure", f"{type(error).__name__}: {error}")
