"""Whole trials: the real proxy and its ledger, a scripted policy, a fake sandbox and a fake harness.

What is asserted of every ending: a complete record on disk, the right cause, nothing left open.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.schema import Config, PoolConfig
from legorl.engine.scripted import ScriptedEngine
from legorl.errors import (
    EngineError,
    ImageError,
    IntegrityError,
    SandboxExecError,
    SandboxStartError,
    TransferError,
)
from legorl.proxy.invariants import check
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.sandbox import pool as pool_module
from legorl.trial import agent as agent_module
from legorl.trial import runner as runner_module
from legorl.trial.archive import interrupted
from legorl.trial.record import read_record
from legorl.trial.runner import TrialRequest, TrialResult, TrialRunner
from tests.fakes import SUBMIT, FakeHarness, FakeProvider, HermesParser
from tests.trial.tasks_for_tests import make_task

FIX = "sed -i -E '2s@ [-+*/%<>=!]+ @ <= @' shop/cart.py && python check.py"
WRONG = FIX.replace("@ <= @", "@ > @")


def call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


class Script:
    """A policy that says its lines one after the other, whatever it is told; the last one again and again."""

    def __init__(self, lines: Sequence[str | Exception | float]) -> None:
        self.lines = list(lines)
        self.asked = asyncio.Event()

    async def __call__(self, prompt: str, rng: random.Random) -> str:
        self.asked.set()
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        if isinstance(line, Exception):
            raise line
        if isinstance(line, float):
            await asyncio.sleep(line)
            return call(SUBMIT)
        return line if line.startswith("=") else call(line)


@dataclass
class Bench:
    """Everything of one test's trials."""

    runner: TrialRunner
    provider: FakeProvider
    proxy: Proxy
    engine: ScriptedEngine
    script: Script
    root: Path

    async def run(self, trial_id: str = "t1", **task: Any) -> TrialResult:
        request = TrialRequest(make_task(self.root / "task", **task), trial_id, "g1", 3, "train")
        async with asyncio.timeout(30):
            return await self.runner.run(request)


@pytest.fixture
def bench(tmp_path: Path, model_dir: Path, laptop: Config):  # type: ignore[no-untyped-def]
    def make(
        lines: Sequence[str | Exception | float],
        *,
        harness: FakeHarness | None = None,
        faults: dict[str, Exception | float] | None = None,
        only: str = "",
        **settings: dict[str, Any],
    ) -> Bench:
        config = copy.deepcopy(laptop)
        config.sandbox.retry_delay_s = 0.01
        for group, values in settings.items():
            for name, value in values.items():
                setattr(getattr(config, "harness" if group == "limits" else group), name, value)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        script = Script(lines)
        engine = ScriptedEngine(script, tokenizer, routing=(2, 2, 8))
        proxy = Proxy(
            engine, Renderer.load(model_dir), HermesParser(), context_tokens=config.engine.max_model_len
        )
        provider = FakeProvider(tmp_path / "boxes", faults, only)
        runner = TrialRunner(
            provider, proxy, harness or FakeHarness(), config, tmp_path / "run", seal=lambda path, _: path
        )
        return Bench(runner, provider, proxy, engine, script, tmp_path)

    return make


async def settled(bench: Bench, result: TrialResult) -> None:
    """What holds after every trial."""
    record = result.record
    directory = bench.root / "run" / record.path
    assert read_record(directory) == record
    assert not list(directory.rglob("*.partial")) and not interrupted(bench.root / "run")
    assert all(box.stopped for box in bench.provider.started), "a sandbox was left behind"
    assert not bench.engine.running, "a request was left in the engine"
    bench.proxy.open(record.id, speaker=FakeHarness().speaker, sampling=None, turn_limit=1, trial_tokens=1)  # type: ignore[arg-type]
    await bench.proxy.close(record.id)
    assert "total" in record.phase_s
    if record.excluded:
        assert record.reward is None and not result.rows


async def test_a_solved_task(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([WRONG, FIX, SUBMIT])
    result = await made.run()
    record = result.record
    assert (record.termination, record.reward, record.excluded) == ("submitted", 1.0, False)
    assert (record.turns, record.rows, record.step, record.group) == (3, 1, 3, "g1")
    assert record.behaviour.submitted_on_green
    assert (record.behaviour.edits, record.behaviour.tests_run, record.behaviour.retries) == (2, 2, 1)
    assert record.routing_coverage == 1.0 and record.weight_version_min == 0
    assert set(record.phase_s) >= {"start", "connect", "agent", "snapshot", "stop", "verify", "total"}
    (row,) = result.rows
    assert check(result.rows) == [] and record.sampled_tokens == int(row.loss_mask.sum())
    directory = made.root / "run" / record.path
    assert "return age <= limit" in (directory / "model.patch").read_text()
    assert json.loads((directory / "verifier" / "result.json").read_text())["reward"] == 1.0
    assert {file.name for file in directory.iterdir()} >= {
        "segments.npz",
        "messages.jsonl.zst",
        "harness.log",
    }
    await settled(made, result)


async def test_an_unsolved_task(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([WRONG, SUBMIT])
    result = await made.run()
    assert (result.record.termination, result.record.reward) == ("submitted", 0.0)
    assert "hidden tests did not pass" in result.record.detail
    assert result.rows and not result.record.behaviour.submitted_on_green
    await settled(made, result)


async def test_the_agents_tests_do_not_count(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench(["echo 'print(\"4 passed\")' > check.py; python check.py", SUBMIT])
    result = await made.run()
    assert result.record.reward == 0.0
    verdict = json.loads((made.root / "run" / result.record.path / "verifier" / "result.json").read_text())
    assert verdict["rolled_back"] == ["check.py"]
    await settled(made, result)


async def test_turn_limit_keeps_the_verifiers_reward(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([FIX], limits={"turn_limit": 2})
    result = await made.run()
    assert (result.record.termination, result.record.reward, result.record.turns) == ("turn_limit", 1.0, 2)
    assert result.rows
    await settled(made, result)


async def test_token_limit(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([FIX, "echo a few more words than that: " + "qxz " * 20], engine={"trial_tokens": 60})
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == ("token_limit", False)
    assert result.record.reward is not None
    await settled(made, result)


async def test_context_overflow(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([FIX, "seq 1 1500"])
    result = await made.run()
    assert (result.record.termination, result.record.reward) == ("context_overflow", 1.0)
    await settled(made, result)


async def test_an_agent_that_hangs(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([FIX], harness=FakeHarness("hang"), limits={"deadline_s": 0.2})
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == ("agent_deadline", True)
    await settled(made, result)


async def test_the_deadline_can_be_graded(bench) -> None:  # type: ignore[no-untyped-def]
    loose = {"exclude_agent_deadline": False}
    made = bench([FIX], harness=FakeHarness("hang"), limits={"deadline_s": 0.2}, filter=loose)
    result = await made.run()
    assert (result.record.termination, result.record.excluded, result.record.reward) == (
        "agent_deadline",
        False,
        0.0,
    )
    await settled(made, result)


@pytest.mark.parametrize(
    ("faults", "only", "cause"),
    [
        ({"start": SandboxStartError("no namespace")}, "", "sandbox_start"),
        ({"start": SandboxStartError("no namespace")}, "-verify", "sandbox_start"),
        ({"start": 60.0}, "", "setup_deadline"),
        ({"connect_proxy": IntegrityError("no socket")}, "", "integrity"),
        ({"set_phase": IntegrityError("no rule")}, "", "integrity"),
        ({"exec": SandboxExecError("gone")}, "", "sandbox_exec"),
        ({"exec": SandboxExecError("gone")}, "-verify", "sandbox_exec"),
        ({"put": TransferError("no space")}, "-verify", "transfer"),
        ({"snapshot": TransferError("unreadable")}, "", "transfer"),
        ({"snapshot": 60.0}, "", "setup_deadline"),
        ({"stop": 60.0}, "", "setup_deadline"),
        ({"snapshot": ValueError("a bug")}, "", "infrastructure"),
    ],
)
async def test_infrastructure(bench, monkeypatch, faults, only, cause) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(runner_module, "STOP_S", 0.3)
    monkeypatch.setattr(pool_module, "START_GRACE_S", 0.2)
    made = bench(
        ["echo x > notes", SUBMIT],
        faults=faults,
        only=only,
        sandbox={"start_timeout_s": 0.5, "transfer_timeout_s": 0.5},
    )
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == (cause, True)
    assert result.record.detail
    assert "Traceback" in (made.root / "run" / result.record.path / "error.txt").read_text()
    await settled(made, result)


async def test_setup_and_verify_are_begun_again(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([WRONG, FIX, SUBMIT])
    made.provider.fail_starts = [
        SandboxStartError("busy"),
        IntegrityError("no filter"),
        None,
        SandboxExecError("lost"),
    ]
    result = await made.run()
    record = result.record
    assert (record.termination, record.reward) == ("submitted", 1.0)
    setup, agent, verify = record.phases
    assert (setup.name, setup.attempts, setup.retried, setup.cause) == (
        "setup",
        3,
        ("sandbox_start", "integrity"),
        "",
    )
    assert (agent.name, agent.attempts, agent.cause) == ("agent", 1, "submitted")
    assert (verify.name, verify.attempts, verify.retried) == ("verify", 2, ("sandbox_exec",))
    assert setup.start <= setup.end <= agent.start <= agent.end <= verify.start <= verify.end
    assert verify.failures == ("sandbox_exec",) and agent.failures == ()
    assert check(result.rows) == []
    await settled(made, result)


async def test_retries_are_bounded_and_an_image_is_not_tried_again(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([SUBMIT], faults={"start": SandboxStartError("busy")}, sandbox={"retries": 3})
    (setup,) = (await made.run()).record.phases
    assert (setup.attempts, setup.cause, setup.failures) == (4, "sandbox_start", ("sandbox_start",) * 4)
    made = bench([SUBMIT], faults={"start": ImageError("no such image")})
    record = (await made.run()).record
    assert record.termination == "image" and record.phases[0].attempts == 1


async def test_the_agent_is_never_begun_again(bench) -> None:  # type: ignore[no-untyped-def]
    """Its sandbox dies under it: excluded with the right cause, although the harness only sees failures."""
    made = bench(["echo x > notes", SUBMIT], faults={"exec": SandboxExecError("gone")})
    result = await made.run()
    assert [(phase.name, phase.attempts, phase.cause) for phase in result.record.phases] == [
        ("setup", 1, ""),
        ("agent", 1, "sandbox_exec"),
    ]
    assert len(made.provider.started) == 1 and result.rows == []
    await settled(made, result)


async def test_a_harness_that_breaks_in_a_dead_sandbox_is_not_to_blame(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([SUBMIT], harness=FakeHarness("crash"), faults={"exec": SandboxExecError("gone")})
    result = await made.run()
    assert result.record.termination == "sandbox_exec"
    made = bench(
        [SUBMIT],
        harness=FakeHarness("hang"),
        faults={"exec": SandboxExecError("gone")},
        limits={"deadline_s": 0.1},
    )
    assert (await made.run()).record.termination == "sandbox_exec", "and no deadline of the agent's"


async def test_an_outage_ends_trials_at_once(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([SUBMIT], faults={"start": SandboxStartError("registry down")}, sandbox={"retries": 0})
    made.runner.config.sandbox.pool.breaker_window = 2
    made.runner.pool.breaker.__init__(  # type: ignore[misc]
        PoolConfig(breaker_window=2, breaker_pause_s=0.01, breaker_probes=1)
    )
    causes = [(await made.run(f"t{number}")).record.termination for number in range(5)]
    assert causes[:2] == ["sandbox_start"] * 2 and causes[-1] == "outage"


async def test_a_dead_engine(bench) -> None:  # type: ignore[no-untyped-def]
    """The harness sees only an error of its model; the trial must not look like the harness's failure."""
    made = bench(["true", EngineError("the engine is gone")])
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == ("engine", True)
    assert "the engine is gone" in result.record.detail
    assert result.record.turns == 1, "the record keeps what there was"
    await settled(made, result)


@pytest.mark.parametrize(("misbehave", "cause"), [("crash", "harness"), ("bug", "infrastructure")])
async def test_a_broken_harness(bench, misbehave: str, cause: str) -> None:  # type: ignore[no-untyped-def]
    made = bench([SUBMIT], harness=FakeHarness(misbehave))
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == (cause, True)
    await settled(made, result)


async def test_a_harness_that_ignores_its_deadline(bench, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(agent_module, "AGENT_GRACE_S", 0.2)
    made = bench([FIX], harness=FakeHarness("stuck"), limits={"deadline_s": 0.2})
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == ("setup_deadline", True)
    assert "agent" in result.record.detail
    await settled(made, result)


async def test_a_broken_invariant_excludes(bench, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(agent_module, "check", lambda ledger: ["I2: call 1 is in 2 rows"])
    made = bench([SUBMIT])
    result = await made.run()
    assert (result.record.termination, result.record.excluded) == ("proxy", True)
    assert result.record.violations == ("I2: call 1 is in 2 rows",)
    await settled(made, result)


async def test_cancellation_cleans_up(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench([30.0])
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(10):
        await made.script.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(box.stopped for box in made.provider.started) and made.provider.started
    assert not made.engine.running
    assert not list((made.root / "run").rglob("trial.json")), "an interrupted trial has no record"
    (record,) = interrupted(made.root / "run")
    assert (record.id, record.termination, record.excluded) == ("t1", "interrupted", True)


async def test_a_full_disk(bench, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("legorl.trial.archive.write_record", full)
    result = await bench([SUBMIT]).run()
    assert (result.record.termination, result.record.excluded, result.rows) == ("infrastructure", True, [])
    assert "No space left" in result.record.detail and "paths.runs" in result.record.detail


async def test_concurrency_is_bounded(bench) -> None:  # type: ignore[no-untyped-def]
    made = bench(["ls", SUBMIT], sandbox={"concurrency": 2})
    results = await asyncio.gather(*(made.run(f"t{index}") for index in range(6)))
    assert [result.record.excluded for result in results] == [False] * 6
    assert made.provider.alive_at_most == 2
