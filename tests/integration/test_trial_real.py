"""Trials on real parts: the real harnesses in real sandboxes on tasks of the pool `repair`, with a scripted
expert in the engine's place. What remains scripted is only what the policy says.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.compose import compose
from legorl.engine.scripted import Policy, ScriptedEngine
from legorl.policy.expert import Expert, Mode
from legorl.policy.tokenizer import corpus, save_tokenizer, train_tokenizer
from legorl.proxy.invariants import check
from legorl.proxy.store import load
from legorl.sandbox.base import Sandbox, SandboxSpec
from legorl.tasks.pool import Pool
from legorl.tasks.synth import synth
from legorl.tasks.task import load_task
from legorl.trial.capture import capture
from legorl.trial.one import Workshop, open_workshop, run_one
from legorl.trial.record import read_record
from legorl.trial.termination import TERMINATIONS, Blame
from tests.fakes import SUBMIT, HermesParser
from tests.integration.docker_engine import IMAGE, Engine, docker_engine
from tests.integration.leftovers import no_leftovers
from tests.tasks.test_task import write

assert docker_engine  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HARNESSES = ("mini_swe_agent", "claude_code", "opencode", "openhands", "codex", "qwen_code")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return synth("repair", 0, 6, 2, tmp_path_factory.mktemp("pools") / "repair")


@pytest.fixture(scope="module")
def model_dir(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    texts = corpus([task.instruction for task in pool.tasks("train")])
    save_tokenizer(train_tokenizer(texts, 768), out, 16384)
    return out


@asynccontextmanager
async def workshop(
    harness: str, policy: Policy, model_dir: Path, run_dir: Path, *over: str
) -> AsyncIterator[Workshop]:
    config = compose([f"harness={harness}", f"paths.runs={run_dir.parent}", *over])
    engine = ScriptedEngine(policy, Tokenizer.from_file(str(model_dir / "tokenizer.json")), routing=(4, 2, 8))
    async with (
        asyncio.timeout(240),
        open_workshop(config, engine, model_dir, HermesParser(), run_dir) as shop,
    ):
        yield shop
    assert not engine.running


@pytest.mark.parametrize("harness", HARNESSES)
async def test_the_expert_solves_a_task(harness: str, pool: Pool, model_dir: Path, tmp_path: Path) -> None:
    task = pool.tasks("train")[0]
    with no_leftovers():
        async with workshop(
            harness, Expert(Mode.PERFECT), model_dir, tmp_path / "run", "harness.deadline_s=120"
        ) as shop:
            result = await run_one(shop, task)
    record = result.record
    assert (record.termination, record.detail, record.reward) == ("submitted", "", 1.0)
    assert record.behaviour.submitted_on_green and record.behaviour.edits >= 1
    assert record.violations == () and record.routing_coverage == 1.0
    assert result.rows and check(result.rows) == []
    directory = tmp_path / "run" / record.path
    assert read_record(directory) == record
    transcript = load(directory)
    for row, stored in zip(result.rows, transcript.rows(), strict=True):
        assert (row.token_ids == stored.token_ids).all() and (row.loss_mask == stored.loss_mask).all()
    assert json.loads((directory / "verifier" / "result.json").read_text())["passed"]
    assert (directory / "model.patch").read_text().startswith("diff --git")


async def test_many_at_once(pool: Pool, model_dir: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    with no_leftovers():
        async with workshop("mini_swe_agent", Expert(Mode.SLOPPY), model_dir, tmp_path / "run") as shop:
            got = await capture(
                pool.tasks("train"),
                24,
                shop.runner,
                label="sloppy",
                progress=lambda done, _: seen.append(done),
            )
    assert seen[-1] == 24
    assert {record.termination for record, _ in got} <= {"submitted", "turn_limit"}
    assert 0 < sum(record.reward or 0 for record, _ in got) < 24, "the sloppy expert solves some, not all"
    assert all(check(rows) == [] for _, rows in got)


class Says:
    """One command, then the submission."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __call__(self, prompt: str, rng: random.Random) -> str:
        command = SUBMIT if "<tool_response>" in prompt.rpartition("Please solve")[2] else self.command
        return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


@pytest.mark.parametrize(
    ("command", "rolled_back"),
    [
        ("echo 'print(\"4 passed\")' > check.py", ["check.py"]),
        ("ls /tests /solution; echo 1 > /logs/verifier/reward.txt; mkdir -p /logs/verifier; true", []),
        ("printf 'import os; os._exit(0)' > sitecustomize.py; mkdir tests; touch tests/test_x.py", None),
        ("rm -rf /workspace/* /workspace/.git", None),
        ("for f in $(find . -name '*.py' -not -name check.py); do echo 'while True: pass' > $f; done", []),
        ("for f in $(find . -name '*.py'); do rm $f && ln -s /tests/run_hidden.py $f; done", None),
    ],
)
async def test_no_trick_gets_the_reward(
    command: str, rolled_back: list[str] | None, pool: Pool, model_dir: Path, tmp_path: Path
) -> None:
    with no_leftovers():
        async with workshop("mini_swe_agent", Says(command), model_dir, tmp_path / "run") as shop:
            result = await run_one(shop, pool.tasks("train")[0])
    assert (result.record.termination, result.record.reward) == ("submitted", 0.0), result.record.detail
    verdict = json.loads((tmp_path / "run" / result.record.path / "verifier" / "result.json").read_text())
    if rolled_back is not None:
        assert verdict["rolled_back"] == rolled_back


async def test_limits_of_the_harness_and_the_proxy(pool: Pool, model_dir: Path, tmp_path: Path) -> None:
    def idle(prompt: str, rng: random.Random) -> str:
        return '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'

    def talk(prompt: str, rng: random.Random) -> str:
        return "I think about it."

    task = pool.tasks("train")[0]
    async with workshop("mini_swe_agent", idle, model_dir, tmp_path / "a") as shop:
        record = (await run_one(shop, task)).record
    assert (record.termination, record.turns, record.reward) == ("turn_limit", 6, 0.0)
    async with workshop("mini_swe_agent", talk, model_dir, tmp_path / "b") as shop:
        record = (await run_one(shop, task)).record
    assert record.termination in ("format_errors", "turn_limit") and record.reward == 0.0


async def test_a_cancelled_trial_leaves_nothing(pool: Pool, model_dir: Path, tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def wait(prompt: str, rng: random.Random) -> str:
        asked.set()
        await asyncio.sleep(600)
        return ""

    with no_leftovers():
        async with workshop("mini_swe_agent", wait, model_dir, tmp_path / "run") as shop:
            trial = asyncio.create_task(run_one(shop, pool.tasks("train")[0]))
            async with asyncio.timeout(60):
                await asked.wait()
            trial.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trial
    assert not list((tmp_path / "run").rglob("trial.json"))


@pytest.mark.parametrize("harness", ["mini_swe_agent", "claude_code"])
async def test_a_killed_sandbox_is_excluded(
    harness: str, pool: Pool, model_dir: Path, tmp_path: Path
) -> None:
    started: list[Sandbox] = []

    async def killing(prompt: str, rng: random.Random) -> str:
        pid = started[0].init_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.5)
        return "Done."

    with no_leftovers():
        async with workshop(harness, killing, model_dir, tmp_path / "run") as shop:
            start = shop.provider.start

            async def watched(spec: SandboxSpec) -> Sandbox:
                started.append(await start(spec))
                return started[-1]

            shop.provider.start = watched  # type: ignore[method-assign]
            result = await run_one(shop, pool.tasks("train")[0])
    record = result.record
    assert record.excluded and record.reward is None and result.rows == []
    assert TERMINATIONS[record.termination].blame is Blame.INFRASTRUCTURE, record.detail
    assert record.phase_s["total"] < 60


def test_the_command_that_runs_one_trial(pool: Pool, tmp_path: Path) -> None:
    """As typed: by path and by id, its story as it goes, its record where it says."""
    task = pool.tasks("train")[0]
    with no_leftovers():
        for name, over in ((str(task.path), []), (task.id, [f"tasks.pool={pool.path}"])):
            out = tmp_path / f"out-{len(over)}"
            argv = [
                sys.executable,
                "-m",
                "legorl.cli",
                "trial",
                "run",
                name,
                *over,
                "--expert",
                "--out",
                str(out),
            ]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "setup done" in done.stdout and "bash sed -i" in done.stdout and "4 passed" in done.stdout
            assert f"look:   legorl trial show {out}/trials/step_0000/one" in done.stdout
            record = read_record(out / "trials" / "step_0000" / "one")
            assert (record.task, record.reward) == (task.id, 1.0)
            assert [phase.name for phase in record.phases] == ["setup", "agent", "verify"]


async def test_a_task_made_for_harbor_alone(model_dir: Path, tmp_path: Path) -> None:
    """No metadata of ours, no result.json: its name, its build context, its reward."""
    path = write(tmp_path / "task", '[task]\nname = "acme/one"\n')
    (path / "tests/test.sh").write_text(
        "grep -qx 'x = 2' app.py && reward=1 || reward=0\necho $reward >/logs/verifier/reward.txt\n"
    )
    for command, reward in (("sed -i s/1/2/ app.py", 1.0), ("touch app.py", 0.0)):
        run_dir = tmp_path / f"run-{reward:g}"
        async with workshop("mini_swe_agent", Says(command), model_dir, run_dir) as shop:
            record = (await run_one(shop, load_task(path))).record
        assert (record.task, record.termination, record.reward) == ("one", "submitted", reward), record.detail
        assert record.behaviour.tests_run == 0


@pytest.mark.slow
def test_one_trial_on_a_docker_engine(pool: Pool, tmp_path: Path, docker_engine: Engine) -> None:
    """A harness of its own runtime and interpreter, in a container."""
    before = docker_engine.containers()
    argv = [sys.executable, "-m", "legorl.cli", "trial", "run", str(pool.tasks("train")[0].path), "--expert"]
    argv += ["sandbox=docker", f"sandbox.docker.host={docker_engine.host}", f"sandbox.image={IMAGE}"]
    argv += ["--out", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "reward 1: submitted" in done.stdout, done.stdout + done.stderr
    assert docker_engine.containers() == before
