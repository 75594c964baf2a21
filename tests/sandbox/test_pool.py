"""The pool over a provider of ten lines: bounds, rate, warm ones, deadlines, breaker, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from legorl.config.schema import PoolConfig, SandboxConfig
from legorl.errors import (
    InfrastructureError,
    OutageError,
    SandboxExecError,
    SandboxStartError,
    SetupDeadlineError,
)
from legorl.sandbox import leased, pool
from legorl.sandbox.base import SandboxSpec
from legorl.sandbox.policy import load_policy
from legorl.sandbox.pool import SandboxPool
from legorl.sandbox.timing import quantile


class Box:
    def __init__(self, owner: Provider, spec: SandboxSpec) -> None:
        self.owner, self.spec, self.join, self.stopped = owner, spec, "joined", 0

    async def put_many(self, files: object) -> str:
        return "many"

    async def exec(self, argv: object, **_: object) -> SimpleNamespace:
        await asyncio.sleep(self.owner.exec_s)
        return SimpleNamespace(code=0)

    async def stop(self) -> None:
        self.stopped += 1
        self.owner.alive.discard(self)


class Provider:
    """Counts; `fails` is asked at every start for an exception."""

    name, limits_by = "ten-lines", "nothing"

    def __init__(self) -> None:
        self.policy = load_policy()
        self.alive: set[Box] = set()
        self.most = self.starts = 0
        self.fails: Callable[[], Exception | None] = lambda: None
        self.start_s = self.exec_s = 0.0
        self.closed = False
        self.started = asyncio.Event()

    async def start(self, spec: SandboxSpec) -> Box:
        self.starts += 1
        self.started.set()
        await asyncio.sleep(self.start_s)
        if (error := self.fails()) is not None:
            raise error
        box = Box(self, spec)
        self.alive.add(box)
        self.most = max(self.most, len(self.alive))
        return box

    async def close(self) -> None:
        self.closed = True


def make(provider: Provider, *, concurrency: int = 4, **pool_keys: float) -> SandboxPool:
    config = SandboxConfig(name="x", concurrency=concurrency, pool=PoolConfig(**pool_keys))  # type: ignore[arg-type]
    return SandboxPool(provider, config)  # type: ignore[arg-type]


def spec(trial: str = "t", task: str = "a", timeout_s: float = 5.0) -> SandboxSpec:
    return SandboxSpec(trial, Path("/") / task, start_timeout_s=timeout_s)


async def test_never_more_than_allowed_and_timed() -> None:
    provider = Provider()
    made = make(provider, concurrency=3)

    async def trial(number: int) -> None:
        sandbox = await made.start(spec(f"t{number}"))
        assert await sandbox.put_many({}) == "many" and sandbox.join == "joined"  # type: ignore[attr-defined]
        await asyncio.sleep(0.005)
        await sandbox.exec(["true"], timeout_s=1)
        await sandbox.stop()
        await sandbox.stop()  # gives one place back, not two

    await asyncio.gather(*(trial(number) for number in range(20)))
    assert provider.most == 3 and not provider.alive
    stats = made.stats()
    assert stats.in_use == 0
    assert {name: each.count for name, each in stats.operations.items()} == {
        "queue": 20, "start": 20, "exec": 20, "stop": 40,
    }  # fmt: skip
    assert 0 < stats.operations["queue"].p50_s <= stats.operations["queue"].p99_s


async def test_no_place_in_time() -> None:
    made = make(Provider(), concurrency=1, queue_timeout_s=0.3)
    held = await made.start(spec())
    with pytest.raises(SandboxStartError, match=r"no turn to start after 0\.3 s \(1 in use"):
        await made.start(spec())
    await held.stop()
    await (await made.start(spec())).stop()


async def test_starts_come_at_a_bounded_rate() -> None:
    made = make(Provider(), concurrency=40, starts_per_s=20)
    began = time.monotonic()
    await asyncio.gather(*(made.start(spec()) for _ in range(26)))
    assert 0.25 < time.monotonic() - began < 2, "20 at once, six more in 0.3 s"


async def test_a_failed_or_cancelled_start_gives_its_place_back() -> None:
    provider = Provider()
    made = make(provider, concurrency=1)
    provider.fails = lambda: SandboxStartError("no")
    with pytest.raises(SandboxStartError):
        await made.start(spec())
    provider.fails = lambda: None
    provider.start_s = 5.0
    start = asyncio.ensure_future(made.start(spec()))
    await asyncio.sleep(0.02)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    provider.start_s = 0.0
    await (await made.start(spec())).stop()
    assert made.stats().operations["start"].failures == {"sandbox_start": 1}


async def test_what_hangs_is_an_error_of_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_GRACE_S", 0.05)
    monkeypatch.setattr(leased, "GRACE_S", 0.05)
    provider = Provider()
    made = make(provider)
    provider.start_s = 5.0
    with pytest.raises(SetupDeadlineError, match=r"ten-lines sandbox took longer than 0\.1 s"):
        await made.start(spec(timeout_s=0.05))
    provider.start_s, provider.exec_s = 0.0, 5.0
    sandbox = await made.start(spec())
    with pytest.raises(SandboxExecError, match="did not return"):
        await sandbox.exec(["true"], timeout_s=0.01)
    assert made.stats().operations["exec"].failures == {"sandbox_exec": 1}


async def test_warm_ones_are_used_once_and_by_their_kind_only() -> None:
    provider = Provider()
    made = make(provider, warm=2)
    first = await made.start(spec("t1"))
    await asyncio.sleep(0.01)
    assert made.stats().warm == 1
    other = await made.start(spec("t2", task="b"))
    assert made.stats().warm_used == 0, "another task's workspace"
    second, third = await made.start(spec("t3")), await made.start(spec("t4"))
    assert made.stats().warm_used >= 1
    inner = {box._sandbox for box in (first, other, second, third)}  # type: ignore[attr-defined]
    assert len(inner) == 4
    for sandbox in (first, other, second, third):
        await sandbox.stop()
    await made.close()
    assert not provider.alive and provider.closed, "warm ones too"


async def test_close_waits_for_those_in_use_and_refuses_new_ones() -> None:
    provider = Provider()
    made = make(provider, drain_s=5)
    sandbox = await made.start(spec())
    closing = asyncio.ensure_future(made.close())
    await asyncio.sleep(0.02)
    assert not closing.done() and not provider.closed
    with pytest.raises(SandboxStartError, match="closed"):
        await made.start(spec())
    await sandbox.stop()
    await asyncio.wait_for(closing, 10)
    assert provider.closed


BREAKER = {"breaker_window": 8, "breaker_rate": 0.5, "breaker_pause_s": 0.05, "breaker_probes": 2}


async def phases(made: SandboxPool, count: int) -> int:
    """What a trial does with the pool; how many phases went well."""
    well = 0
    for _ in range(count):
        try:
            await (await made.start(spec())).stop()
        except OutageError:
            raise
        except InfrastructureError as error:
            made.breaker.report(error.cause, str(error))
        else:
            made.breaker.report("")
            well += 1
    return well


async def test_a_dead_registry_ends_the_run() -> None:
    provider = Provider()
    made = make(provider, **BREAKER)
    assert await phases(made, 8) == 8
    provider.fails = lambda: SandboxStartError("registry.invalid: connection refused")
    began = time.monotonic()
    with pytest.raises(OutageError) as caught:
        await phases(made, 100)
    assert time.monotonic() - began > 0.1, "two pauses, each with a probe"
    assert 5 + 2 <= provider.starts - 8 <= 8 + 2
    assert "sandbox_start" in str(caught.value) and "connection refused" in str(caught.value)
    provider.fails = lambda: None
    with pytest.raises(OutageError):
        await made.start(spec())


async def test_an_outage_that_passes_only_pauses() -> None:
    provider = Provider()
    made = make(provider, **BREAKER)
    down = iter([True] * 9 + [False] * 1000)  # a window of failures, then a probe that fails
    provider.fails = lambda: SandboxStartError("down") if next(down) else None
    assert await phases(made, 60) == 51
    assert made.breaker.state == "closed"
    assert provider.most == 1


async def test_one_probe_at_a_time_and_one_that_is_given_up_frees_the_next() -> None:
    provider = Provider()
    made = make(provider, concurrency=16, **(BREAKER | {"breaker_window": 4}))
    for _ in range(4):
        made.breaker.report("transfer", "gone")
    assert made.breaker.state == "open"
    provider.start_s = 0.2
    waiting = [asyncio.ensure_future(made.start(spec())) for _ in range(8)]
    await asyncio.wait_for(provider.started.wait(), 10)
    assert provider.starts == 1 and made.breaker.state == "half open"
    for start in waiting[:-1]:
        start.cancel()
    await asyncio.gather(*waiting[:-1], return_exceptions=True)
    await waiting[-1]
    assert provider.starts == 2 and made.breaker.state == "closed"


async def test_half_of_the_phases_may_fail() -> None:
    made = make(Provider(), **BREAKER)
    for _ in range(40):
        made.breaker.report("transfer", "flaky")
        made.breaker.report("")
    assert made.breaker.state == "closed"


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50.0, 99.0, 7.0)
