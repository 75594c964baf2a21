"""Deadlines, clean-up under cancellation, and what an exception means."""

from __future__ import annotations

import asyncio

import pytest

from legorl import errors
from legorl.errors import InfrastructureError, SetupDeadlineError
from legorl.trial.phases import PhaseClock, ending_of, to_the_end
from legorl.trial.termination import TERMINATIONS, Blame


async def test_a_phase_is_timed_and_bounded() -> None:
    clock = PhaseClock()
    with pytest.raises(SetupDeadlineError, match=r"Phase start took longer than 0\.05 s"):
        async with clock.phase("start", 0.05):
            await asyncio.sleep(5)
    assert 0.04 < clock.seconds["start"] < 1
    async with clock.phase("start", 5):
        await asyncio.sleep(0.05)
    assert clock.seconds["start"] > 0.09, "a phase entered twice adds up"


async def test_a_timeout_from_within_is_not_the_phases() -> None:
    with pytest.raises(TimeoutError, match="inner"):
        async with PhaseClock().phase("agent", 5):
            raise TimeoutError("inner")


async def test_cleanup_survives_cancellation() -> None:
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(0.1)
        ended.set()

    task = asyncio.create_task(to_the_end(work(), 5))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_cleanup_has_a_deadline() -> None:
    with pytest.raises(SetupDeadlineError):
        await to_the_end(asyncio.sleep(5), 0.05)


def test_every_typed_failure_has_its_row() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, InfrastructureError)]
    assert len(kinds) > 10
    for kind in kinds:
        ending = ending_of(kind("why"))
        assert TERMINATIONS[ending.termination].blame is Blame.INFRASTRUCTURE and ending.detail == "why"


def test_what_nobody_foresaw() -> None:
    assert ending_of(KeyError("x")).termination == "infrastructure"
    assert "KeyError" in ending_of(KeyError("x")).detail
    assert ending_of(TimeoutError()).termination == "setup_deadline"
