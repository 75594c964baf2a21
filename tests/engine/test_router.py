"""The router over engines of ours that take their time, die, hang and come back, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from legorl.engine import router as router_module
from legorl.engine.assemble import aborted
from legorl.engine.base import Finish, Sample, Sampling
from legorl.engine.calls import Calls
from legorl.engine.router import PATIENCE, Router
from legorl.errors import EngineDownError, EngineError, EngineLostError
from tests.engine.virtual_time import run

CHECK_S = 5.0
DEADLINE_S = 1000.0


@dataclass
class FakeEngine:
    """Answers `number` after `seconds`, as long as it is `up`."""

    number: int
    seconds: float = 1.0
    state: str = "up"
    """`up`; `gone` refuses connections; `hung` takes requests and health checks and answers nothing;
    `stuck` is healthy and answers nothing; `sick` is healthy and fails every request."""
    begun: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    working: set[str] = field(default_factory=set)
    closed: bool = False

    def __post_init__(self) -> None:
        self.name = f"Engine {self.number}"
        self._calls = Calls(self.name, DEADLINE_S)
        self._broken = asyncio.Event()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        sample = await self._calls.run(request_id, self._work(request_id))
        return aborted(routed_from) if sample is None else sample

    async def _work(self, request_id: str) -> Sample:
        await asyncio.sleep(0.01)
        if self.state == "gone":
            raise EngineDownError(f"{self.name} refuses")
        self.begun.append(request_id)
        self.working.add(request_id)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    await self._broken.wait()
                raise EngineError(f"{self.name} broke off")
            if self.state == "sick":
                raise EngineError(f"{self.name} answered 500")
            if self.state != "up":
                await asyncio.sleep(10 * DEADLINE_S)
        except asyncio.CancelledError:
            self.stopped.append(request_id)
            raise
        finally:
            self.working.discard(request_id)
        self.answered.append(request_id)
        one = np.full(1, self.number, np.int32)
        return Sample(one, np.zeros(1, np.float32), one, Finish.STOP)

    async def abort(self, request_id: str) -> None:
        await self._calls.abort(request_id)

    async def check(self) -> None:
        await asyncio.sleep(0.01)
        if self.state == "gone":
            raise EngineDownError(f"{self.name} refuses")
        if self.state == "hung":
            await asyncio.sleep(10)
            raise EngineError(f"{self.name} does not answer")

    async def close(self) -> None:
        self.closed = True
        await self._calls.close()

    def die(self) -> None:
        """The process ends: open connections break, no new ones."""
        self.state = "gone"
        self._broken.set()
        self._broken = asyncio.Event()


@contextlib.asynccontextmanager
async def routed(*engines: FakeEngine):  # type: ignore[no-untyped-def]
    """A router over them that leaves no task behind."""
    router = Router(engines, check_every_s=CHECK_S)
    try:
        yield router
    finally:
        await router.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert all(engine.closed for engine in engines)


async def ask(router: Router, name: str, sticky: str = "") -> int:
    """The number of the engine that answers."""
    sample = await router.generate(name, [1], Sampling(), sticky=sticky)
    return int(sample.token_ids[0])


def test_trials_spread_and_stay() -> None:
    async def main() -> None:
        async with routed(FakeEngine(0), FakeEngine(1), FakeEngine(2)) as router:
            first = await asyncio.gather(*(ask(router, f"a{n}", f"t{n}") for n in range(9)))
            assert Counter(first) == {0: 3, 1: 3, 2: 3}
            for turn in range(5):  # one after another, so that load says nothing
                again = [await ask(router, f"b{turn}.{n}", f"t{n}") for n in range(9)]
                assert again == first
            one_by_one = [await ask(router, f"c{n}", f"u{n}") for n in range(9)]
            assert Counter(one_by_one) == {0: 3, 1: 3, 2: 3}

    run(main())


def test_the_first_choice_goes_where_least_is_to_do() -> None:
    async def main() -> None:
        async with routed(FakeEngine(0, 100.0), FakeEngine(1)) as router:
            slow = asyncio.create_task(ask(router, "slow", "s"))
            await asyncio.sleep(0.1)
            assert [await ask(router, f"q{n}", f"t{n}") for n in range(3)] == [1, 1, 1]
            assert await slow == 0

    run(main())


def test_a_death_marks_what_it_interrupted_and_moves_the_rest() -> None:
    async def main() -> None:
        engines = FakeEngine(0, 20.0), FakeEngine(1)
        async with routed(*engines) as router:
            assert await ask(router, "a1", "a") == 0
            assert await ask(router, "b1", "b") == 1
            flight = asyncio.create_task(ask(router, "c1", "c"))
            await asyncio.sleep(1)
            engines[0].die()
            with pytest.raises(EngineLostError, match="Engine 0 died with request c1 in flight") as caught:
                await flight
            assert (caught.value.engine, caught.value.request_id) == ("Engine 0", "c1")
            assert caught.value.cause == "engine"
            assert [await ask(router, f"a{n}", "a") for n in (2, 3)] == [1, 1]
            engines[0].state, engines[0].seconds = "up", 1.0
            await asyncio.sleep(2 * CHECK_S)
            assert await ask(router, "a4", "a") == 1  # its prefix is there now
            assert await ask(router, "d1", "d") == 0  # the other has more trials

    run(main())


def test_a_connection_refused_is_no_loss() -> None:
    """The engine is gone and no health check has seen it yet: nothing took the request."""

    async def main() -> None:
        engines = FakeEngine(0), FakeEngine(1)
        async with routed(*engines) as router:
            assert await ask(router, "a1", "a") == 0
            engines[0].die()
            assert await ask(router, "a2", "a") == 1

    run(main())


def test_a_hung_engine_is_dropped_by_its_health_checks() -> None:
    async def main() -> None:
        engines = FakeEngine(0, 3.0), FakeEngine(1)
        async with routed(*engines) as router:
            flight = asyncio.create_task(ask(router, "a1", "a"))
            await asyncio.sleep(1)
            engines[0].state = "hung"
            with pytest.raises(EngineLostError, match="does not answer"):
                await flight
            now = asyncio.get_running_loop().time()
            assert now < (PATIENCE + 1) * (CHECK_S + 10) < DEADLINE_S
            assert engines[0].stopped == ["a1"]
            assert await ask(router, "a2", "a") == 1

    run(main())


@pytest.mark.parametrize("state", ["sick", "stuck"])
def test_a_healthy_engine_that_answers_nothing_loses_its_turn(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engines = FakeEngine(0, state=state), FakeEngine(1)
        async with routed(*engines) as router:
            asked = [asyncio.create_task(ask(router, f"a{n}", f"t{n}")) for n in range(2 * PATIENCE)]
            results = await asyncio.gather(*asked, return_exceptions=True)
            failed = [result for result in results if isinstance(result, EngineError)]
            assert len(failed) == PATIENCE
            assert results.count(1) == PATIENCE
            assert await ask(router, "b", "t0") == 1
            await asyncio.sleep(200)
            assert await ask(router, "c", "new") == 1  # it does not come back without a sample
            engines[0].state = "up"
            await asyncio.sleep(200)
            assert await ask(router, "d", "newer") == 0

    run(main())


def test_abort_reaches_the_engine_that_has_the_request() -> None:
    async def main() -> None:
        engines = FakeEngine(0, 100.0), FakeEngine(1, 100.0)
        async with routed(*engines) as router:
            asked = [
                asyncio.create_task(router.generate(f"a{n}", [1], Sampling(), sticky=f"t{n}"))
                for n in range(4)
            ]
            await asyncio.sleep(1)
            for n in range(4):
                await router.abort(f"a{n}")
                assert (await asked[n]).finish is Finish.ABORT
                assert f"a{n}" in engines[n % 2].stopped
            await router.abort("unknown")
            new = asyncio.create_task(router.generate("b", [1], Sampling()))
            await asyncio.sleep(0)
            await router.abort("b")  # at once, before any engine has begun it
            assert (await new).finish is Finish.ABORT
            assert not any("b" in engine.answered for engine in engines)
            with pytest.raises(EngineError, match="in flight already"):
                again = asyncio.create_task(router.generate("c", [1], Sampling()))
                await asyncio.sleep(0)
                try:
                    await router.generate("c", [1], Sampling())
                finally:
                    again.cancel()
                    await asyncio.wait({again})

    run(main())


def test_abort_on_the_way_to_another_engine() -> None:
    async def main() -> None:
        engines = FakeEngine(0), FakeEngine(1)
        async with routed(*engines) as router:
            engines[0].die()
            asked = asyncio.create_task(router.generate("a", [1], Sampling()))
            await asyncio.sleep(0.015)  # refused by the first, and the router is looking whether it lives
            await router.abort("a")
            assert (await asked).finish is Finish.ABORT
            assert engines[1].begun == []

    run(main())


def test_all_dead_is_said_at_once() -> None:
    async def main() -> None:
        engines = FakeEngine(0), FakeEngine(1)
        async with routed(*engines) as router:
            for engine in engines:
                engine.die()
            with pytest.raises(
                EngineDownError, match="No engine is alive: Engine 0 refuses; Engine 1 refuses"
            ):
                await ask(router, "a1", "a")
            assert asyncio.get_running_loop().time() < 1

    run(main())


def test_stickiness_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "TRIALS_REMEMBERED", 8)

    async def main() -> None:
        async with routed(FakeEngine(0), FakeEngine(1)) as router:
            for n in range(50):
                await ask(router, f"a{n}", f"t{n}")
            assert len(router._sticky) == 8
            assert sum(router._trials.values()) == 8

    run(main())


def test_no_engine_is_a_mistake() -> None:
    with pytest.raises(EngineError, match="at least one"):
        Router([])


ENGINES = 3
ACTION = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 5), st.floats(0.1, 30.0)),
    st.tuples(st.just("die"), st.integers(0, ENGINES - 1), st.just(0.0)),
    st.tuples(st.just("hang"), st.integers(0, ENGINES - 1), st.just(0.0)),
    st.tuples(st.just("back"), st.integers(0, ENGINES - 1), st.just(0.0)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0.0)),
    st.tuples(st.just("leave"), st.integers(0, 30), st.just(0.0)),
    st.tuples(st.just("wait"), st.just(0), st.floats(0.0, 20.0)),
)


@given(st.lists(ACTION, min_size=5, max_size=60))
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_whatever_happens(actions: list[tuple[str, int, float]]) -> None:
    run(_story(actions))


@dataclass
class Story:
    """What happened to three engines and to the requests on them."""

    engines: list[FakeEngine] = field(default_factory=lambda: [FakeEngine(n) for n in range(ENGINES)])
    ever_down: set[int] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    tasks: dict[str, asyncio.Task[Sample]] = field(default_factory=dict)

    async def do(self, router: Router, kind: str, index: int, seconds: float) -> None:
        """One action."""
        name = f"r{index % max(len(self.tasks), 1)}"
        if kind == "ask":
            for engine in self.engines:
                engine.seconds = seconds
            name = f"r{len(self.tasks)}"
            work = router.generate(name, [1], Sampling(), sticky=f"t{index}")
            self.tasks[name] = asyncio.create_task(work, name=name)
        elif kind == "die":
            self.engines[index].die()
            self.ever_down.add(index)
        elif kind == "hang" and self.engines[index].state == "up":
            self.engines[index].state = "hung"
            self.ever_down.add(index)
        elif kind == "back":
            self.engines[index].state = "up"
        elif kind == "abort" and name in self.tasks:
            await router.abort(name)
            self.aborted.add(name)
            await asyncio.sleep(0.001)  # what ended by itself at the same instant has ended after this
            assert not any(name in engine.working for engine in self.engines)
        elif kind == "leave" and name in self.tasks:
            self.tasks[name].cancel()
            self.left.add(name)
        else:
            await asyncio.sleep(seconds)

    def check(self, name: str, task: asyncio.Task[Sample]) -> None:
        """It ended, in one way, for a reason."""
        assert task.done(), f"{name} is lost"
        begun = [engine.number for engine in self.engines if name in engine.begun]
        answered = [engine.number for engine in self.engines for one in engine.answered if one == name]
        assert len(begun) <= 1, f"{name} was taken by {begun}"
        assert len(answered) <= 1
        if task.cancelled():
            assert name in self.left
            return
        error = task.exception()
        if error is None and task.result().finish is Finish.ABORT:
            assert name in self.aborted
        elif error is None:
            assert task.result().token_ids.tolist() == answered == begun
        else:
            assert isinstance(error, EngineError)
            assert not answered, f"{name} was answered and raised {error!r}"
            if isinstance(error, EngineLostError):
                assert error.request_id == name
                assert int(error.engine.split()[1]) in self.ever_down
            elif isinstance(error, EngineDownError):
                assert self.ever_down == set(range(ENGINES)) and not begun
            else:
                assert set(begun) <= self.ever_down


async def _story(actions: list[tuple[str, int, float]]) -> None:
    story = Story()
    async with routed(*story.engines) as router:
        for action in actions:
            await story.do(router, *action)
        for engine in story.engines:
            engine.state = "up"
        if story.tasks:
            await asyncio.wait(story.tasks.values(), timeout=20 * DEADLINE_S)
        for name, task in story.tasks.items():
            story.check(name, task)
        await asyncio.sleep(100)
        for engine in story.engines:
            engine.seconds = 1.0
        back = await asyncio.gather(*(ask(router, f"z{n}", f"z{n}") for n in range(4 * ENGINES)))
        assert set(back) == set(range(ENGINES)), "an engine did not come back"
