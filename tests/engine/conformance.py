"""What every `TokenEngine` must do. A test class per engine inherits `EngineConformance`, with a `Subject`.

Every wait has a deadline: an engine that hangs fails its test.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest

from legorl.engine.base import Finish, Sample, Sampling, TokenEngine
from legorl.errors import EngineError

DEADLINE_S = 60.0
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
ENDLESS_PROMPT = [20, 21, 22, 23]


@dataclass
class Subject:
    """An engine under test, and what is known about what it serves."""

    engine: TokenEngine
    running: Callable[[], Awaitable[int]]
    """Requests that the engine itself, not its client, is working on."""
    endless: Sampling
    """For a reply to `ENDLESS_PROMPT` that lasts at least many seconds."""
    routing: tuple[int, int] | None = (4, 2)
    """Layers and experts per token."""
    version: int = 0
    """Of the weights."""

    async def sample(self, name: str, prompt: object, sampling: Sampling, routed_from: int = 0) -> Sample:
        """One request."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.engine.generate(name, prompt, sampling, routed_from=routed_from)  # type: ignore[arg-type]

    async def begin(self, name: str) -> asyncio.Task[Sample]:
        """A request that goes on and on; the engine is working on it."""
        task = asyncio.create_task(self.sample(name, ENDLESS_PROMPT, self.endless))
        await self.settles(1)
        return task

    async def settles(self, count: int) -> None:
        """Waits until the engine works on so many requests."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.running() != count:  # noqa: ASYNC110 - it is another process that changes it
                await asyncio.sleep(0.05)


class EngineConformance:
    """Inherit, and override the fixture `subject`."""

    @pytest.fixture
    def subject(self) -> Subject:
        """The engine."""
        raise NotImplementedError

    async def test_a_reply_has_ids_logprobs_and_versions(self, subject: Subject) -> None:
        sample = await subject.sample("shape", PROMPT, Sampling(max_tokens=6))
        count = len(sample.token_ids)
        assert 1 <= count <= 6
        assert sample.token_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert sample.logprobs.shape == sample.weight_version.shape == (count,)
        assert np.isfinite(sample.logprobs).all() and (sample.logprobs <= 1e-6).all()
        assert sample.weight_version.dtype == np.int32
        assert (sample.weight_version == subject.version).all()
        assert sample.finish in ((Finish.LENGTH, Finish.STOP) if count == 6 else (Finish.STOP,))

    async def test_a_prompt_may_be_a_list_or_an_array(self, subject: Subject) -> None:
        for index, prompt in enumerate((PROMPT, tuple(PROMPT), np.array(PROMPT, np.int32)[:])):
            sample = await subject.sample(f"prompt{index}", prompt, Sampling(max_tokens=1))
            assert len(sample.token_ids) == 1

    @pytest.mark.parametrize("known", [0, 5, len(PROMPT) - 1, len(PROMPT)])
    async def test_only_new_routing_rows_come(self, subject: Subject, known: int) -> None:
        sample = await subject.sample(f"rows{known}", PROMPT, Sampling(max_tokens=4), known)
        rows = sample.routed_experts
        if subject.routing is None:
            assert rows is None
            return
        assert rows is not None
        assert rows.shape == (len(PROMPT) + len(sample.token_ids) - 1 - known, *subject.routing)
        assert rows.dtype == np.uint8
        assert sample.routed_start == known

    async def test_a_reply_stays_within_its_limit_whoever_else_asks(self, subject: Subject) -> None:
        limits = range(1, 9)
        replies = await asyncio.gather(
            *(subject.sample(f"many{limit}", PROMPT, Sampling(max_tokens=limit)) for limit in limits)
        )
        for limit, sample in zip(limits, replies, strict=True):
            assert 1 <= len(sample.token_ids) <= limit
            if len(sample.token_ids) < limit:
                assert sample.finish is Finish.STOP

    async def test_abort_stops_the_engine(self, subject: Subject) -> None:
        task = await subject.begin("abort")
        await subject.engine.abort("unknown")
        assert not task.done()
        await subject.engine.abort("abort")
        async with asyncio.timeout(DEADLINE_S):
            sample = await task
        assert sample.finish is Finish.ABORT
        await subject.settles(0)
        assert len((await subject.sample("after", PROMPT, Sampling(max_tokens=1))).token_ids) == 1

    async def test_leaving_stops_the_engine(self, subject: Subject) -> None:
        task = await subject.begin("leave")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await subject.settles(0)

    async def test_abort_reaches_one_request_only(self, subject: Subject) -> None:
        first = await subject.begin("one")
        second = asyncio.create_task(subject.sample("two", ENDLESS_PROMPT, subject.endless))
        await subject.settles(2)
        await subject.engine.abort("two")
        async with asyncio.timeout(DEADLINE_S):
            assert (await second).finish is Finish.ABORT
        await subject.settles(1)
        assert not first.done()
        await subject.engine.abort("one")
        async with asyncio.timeout(DEADLINE_S):
            await first
        await subject.settles(0)

    async def test_an_id_is_in_flight_once(self, subject: Subject) -> None:
        task = await subject.begin("twice")
        with pytest.raises(EngineError, match="twice"):
            await subject.sample("twice", PROMPT, Sampling(max_tokens=1))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await subject.settles(0)
        await subject.sample("twice", PROMPT, Sampling(max_tokens=1))  # and may be used again


class DeadlineConformance:
    """For engines with a deadline of their own: `hasty` is the engine of `subject` with half a second."""

    @pytest.fixture
    def hasty(self) -> TokenEngine:
        """The engine."""
        raise NotImplementedError

    async def test_a_reply_past_its_deadline_is_stopped(self, subject: Subject, hasty: TokenEngine) -> None:
        with pytest.raises(EngineError, match=r"within 0\.5 s"):
            async with asyncio.timeout(DEADLINE_S):
                await hasty.generate("late", ENDLESS_PROMPT, subject.endless)
        await subject.settles(0)
