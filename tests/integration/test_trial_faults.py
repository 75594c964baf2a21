"""Two hundred trials in real sandboxes, each with a fault: all are infrastructure's, with the right cause,
none is taken for the agent's end, and nothing is left behind. Between them, trials without a fault succeed.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.compose import compose
from legorl.config.schema import Config
from legorl.engine.scripted import ScriptedEngine
from legorl.errors import EngineError
from legorl.proxy.proxy import Proxy
from legorl.proxy.render import Renderer
from legorl.sandbox import cgroups, leased, pool
from legorl.sandbox.providers import open_provider
from legorl.tasks.task import Task
from legorl.trial.archive import interrupted
from legorl.trial.record import read_record
from legorl.trial.runner import TrialRequest, TrialResult, TrialRunner
from legorl.trial.termination import RETRIED, TERMINATIONS, Blame
from tests.fakes import HermesParser
from tests.integration.docker_engine import IMAGE, Engine, docker_engine
from tests.integration.kubernetes_cluster import Cluster, cluster
from tests.integration.leftovers import no_leftovers
from tests.trial.conftest import make_model
from tests.trial.faulty import FAULTS, Fault, FaultyProvider
from tests.trial.script_harness import SUBMIT, ScriptHarness
from tests.trial.tasks_for_tests import make_task
from tests.trial.test_runner import FIX, call

assert docker_engine and cluster  # fixtures
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EACH = 8
"""Trials per fault."""
HEALTHY = 16
KILLED = 12
"""Trials of each runner that is killed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made"))


def policy(prompt: str, rng: random.Random) -> str:
    """Fixes and submits; what the instruction says otherwise, it does."""
    if "ENGINE-FAILS" in prompt:
        raise EngineError("500 Internal Server Error")
    if "<tool_response>" in prompt or "DO-NOTHING" in prompt:
        return call(SUBMIT)
    return call(FIX)


def tasks(root: Path) -> dict[str, Task]:
    made = {
        "fixable": make_task(root / "fixable", verify_timeout_s=6.0),
        "engine": make_task(root / "engine", instruction="ENGINE-FAILS"),
        "broken verifier": make_task(root / "broken", instruction="DO-NOTHING"),
    }
    (made["broken verifier"].tests / "test.sh").write_text("kill -9 $$\n")
    return made


def settings(run_dir: Path) -> Config:
    config = copy.deepcopy(compose([f"paths.cache={run_dir.parent / 'cache'}"]))
    config.sandbox.concurrency, config.sandbox.retries, config.sandbox.retry_delay_s = 24, 1, 0.0
    config.sandbox.start_timeout_s = config.sandbox.transfer_timeout_s = 6.0
    config.sandbox.memory_mb, config.sandbox.disk_mb = 128, 32
    config.sandbox.pool.breaker_rate = 1.0  # all of them fail: that is the test
    config.harness.deadline_s = 10.0
    return config


async def run_trials(
    plan: dict[str, Fault | None], root: Path, model: Path, run_dir: Path, *sandbox: str
) -> dict[str, TrialResult]:
    """All trials of a plan at once, as many as there is room for."""
    config = settings(run_dir)
    if sandbox:
        config.sandbox.start_timeout_s, config.sandbox.concurrency = 60.0, 8
        config.sandbox.transfer_timeout_s, config.harness.deadline_s = 15.0, 30.0
    engine = ScriptedEngine(policy, Tokenizer.from_file(str(model / "tokenizer.json")))
    proxy = Proxy(engine, Renderer.load(model), HermesParser(), context_tokens=config.engine.max_model_len)
    inner = open_provider(compose(sandbox).sandbox)
    faults = {name: fault for name, fault in plan.items() if fault is not None}
    runner = TrialRunner(FaultyProvider(inner, faults), proxy, ScriptHarness(), config, run_dir)
    made = tasks(root)

    async def one(name: str, fault: Fault | None) -> TrialResult:
        task = made["fixable" if fault is None else fault.task]
        return await runner.run(TrialRequest(task, name, "g", 0, "train"))

    try:
        done = await asyncio.gather(*(one(name, fault) for name, fault in plan.items()))
    finally:
        await runner.close()
        await proxy.aclose()
        await engine.close()
    assert not engine.running
    return dict(zip(plan, done, strict=True))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process, mount, namespace or control group; orphans of a killed child become this process's."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    before = orphaned_groups()
    try:
        with no_leftovers():
            yield
            reap()
    finally:
        ctypes.CDLL(None).prctl(36, 0)
    end = time.monotonic() + 10
    while orphaned_groups() - before and time.monotonic() < end:  # others' may come and go beside this test
        time.sleep(0.1)
    assert not orphaned_groups() - before


def reap() -> None:
    """Collect the dead that came to this process when their parent was killed."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return


def orphaned_groups() -> set[Path]:
    """Control groups of sandboxes whose owner is dead."""
    hierarchy = cgroups.find()
    found = set()
    for parent in set() if hierarchy is None else {hierarchy.memory, hierarchy.pids}:
        for directory in parent.glob(cgroups.GROUPS):
            lock = cgroups._lock(str(directory))
            if lock is not None:
                os.close(lock)
                found.add(directory)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up on soon."""
    monkeypatch.setattr(leased, "GRACE_S", 2.0)
    monkeypatch.setattr(pool, "START_GRACE_S", 1.0)


def planned(each: int, healthy: int) -> dict[str, Fault | None]:
    """Every fault so many times, between trials without one."""
    plan: dict[str, Fault | None] = {f"healthy-{n}": None for n in range(healthy)}
    for name, fault in FAULTS.items():
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower())
        plan |= {f"{plain}-{n}": fault for n in range(each)}
    return plan


@pytest.mark.usefixtures("impatient")
async def test_two_hundred_faults(tmp_path: Path, model: Path) -> None:
    plan = planned(EACH, HEALTHY)
    with nothing_left():
        results = await run_trials(plan, tmp_path / "tasks", model, tmp_path / "run")
    assert len(results) - HEALTHY == EACH * len(FAULTS) >= 176
    check(plan, results, tmp_path / "run")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fault | None]:
    """Each fault once, but for the start that hangs: starts are given more time on an engine."""
    monkeypatch.setattr(leased, "GRACE_S", 5.0)
    plan = planned(1, 3)
    del plan["ready-hung-0"]
    return plan


@pytest.mark.slow
async def test_faults_on_a_docker_engine(
    tmp_path: Path, model: Path, docker_engine: Engine, patient: dict[str, Fault | None]
) -> None:
    before = docker_engine.containers()
    sandbox = ("sandbox=docker", f"sandbox.docker.host={docker_engine.host}", f"sandbox.image={IMAGE}")
    results = await run_trials(patient, tmp_path / "tasks", model, tmp_path / "run", *sandbox)
    assert docker_engine.containers() == before
    check(patient, results, tmp_path / "run")


@pytest.mark.slow
async def test_faults_on_kubernetes(
    tmp_path: Path, model: Path, cluster: Cluster, patient: dict[str, Fault | None]
) -> None:
    from tests.integration.test_sandbox_kubernetes import pods  # needs the client library

    before = await pods(cluster)
    results = await run_trials(patient, tmp_path / "tasks", model, tmp_path / "run", *cluster.overrides)
    check(patient, results, tmp_path / "run")
    end = time.monotonic() + 60  # a deleted pod takes its time
    while (left := set(await pods(cluster)) - set(before)) and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(1)
    assert not left


def check(plan: dict[str, Fault | None], results: dict[str, TrialResult], run_dir: Path) -> None:
    """Every trial ended as its fault says, or well without one."""
    wrong = []
    for name, result in results.items():
        record, fault = result.record, plan[name]
        assert read_record(run_dir / record.path) == record
        if fault is None:
            if (record.termination, record.reward) != ("submitted", 1.0) or not result.rows:
                wrong.append(f"{name}: {record.termination} {record.reward} {record.detail}")
            continue
        last = record.phases[-1]
        if (record.termination, last.name) != (fault.cause, fault.phase):
            wrong.append(f"{name}: {record.termination} in {last.name}: {record.detail}")
            continue
        attempts = 2 if fault.phase != "agent" and fault.cause in RETRIED else 1
        assert last.attempts == attempts, f"{name}: {record.phases}"
        assert TERMINATIONS[record.termination].blame is Blame.INFRASTRUCTURE
        assert record.excluded and record.reward is None and not result.rows and record.detail
    assert not wrong, "\n".join(wrong)
    assert not interrupted(run_dir)


@pytest.mark.parametrize("phase", ["agent", "verify"])
def test_a_runner_that_is_killed(phase: str, tmp_path: Path, model: Path) -> None:
    """`kill -9` of the process that runs the trials."""
    run_dir = tmp_path / "run"
    argv = [sys.executable, "-m", "tests.integration.test_trial_faults", phase, str(tmp_path), str(model)]
    with nothing_left():
        with (tmp_path / "log").open("wb") as log:
            child = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            wait_for(lambda: busy(child.pid) >= KILLED, child, tmp_path / "log")
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(10)
        # What the dead owner's groups left is removed by the next that comes.
        hierarchy = cgroups.find()
        end = time.monotonic() + 10
        while hierarchy is not None and orphaned_groups() and time.monotonic() < end:
            hierarchy.reap()
    records = interrupted(run_dir)
    assert len(records) == KILLED and not list(run_dir.rglob("trial.json"))
    assert {record.termination for record in records} == {"interrupted"}
    assert TERMINATIONS["interrupted"].blame is Blame.INFRASTRUCTURE


def busy(pid: int) -> int:
    """How many sandboxes of a process run the command that waits."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            count += words[:2] == [b"sleep", str(WAIT_S + pid).encode()]
    return count


WAIT_S = 100_000
"""The waiting command's argument is this and the runner's pid, so that it can be told from any other."""


def wait_for(condition: object, child: subprocess.Popen[bytes], log: Path, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert child.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


def test_a_full_disk_under_the_records(tmp_path: Path, model: Path) -> None:
    """A file system of 64 kB takes the first few records; the other trials are infrastructure's."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(run_dir)]
    with nothing_left():
        subprocess.run(mount, check=True, timeout=10)
        try:
            plan: dict[str, Fault | None] = {f"trial-{n}": None for n in range(12)}
            results = asyncio.run(run_trials(plan, tmp_path / "tasks", model, run_dir))
        finally:
            subprocess.run(["umount", str(run_dir)], check=True, timeout=10)
    endings = Counter(result.record.termination for result in results.values())
    assert set(endings) <= {"submitted", "infrastructure"} and endings["infrastructure"] >= 4, endings
    for result in results.values():
        if result.record.termination == "infrastructure":
            assert "No space left" in result.record.detail and not result.rows and result.record.excluded


def main(phase: str, tmp_path: str, model: str) -> None:
    """In the child: trials that never end, in the agent phase or in the verify phase."""
    wait = f"sleep {WAIT_S + os.getpid()}"
    root = Path(tmp_path)

    def waits(prompt: str, rng: random.Random) -> str:
        return call(SUBMIT if phase == "verify" else wait)

    made = tasks(root / "tasks")["fixable"]
    if phase == "verify":
        (made.tests / "test.sh").write_text(f"{wait}\n")

    async def run() -> None:
        config = settings(root / "run")
        config.harness.deadline_s = 120.0
        engine = ScriptedEngine(waits, Tokenizer.from_file(f"{model}/tokenizer.json"))
        proxy = Proxy(
            engine, Renderer.load(Path(model)), HermesParser(), context_tokens=config.engine.max_model_len
        )
        provider = open_provider(compose([]).sandbox)
        runner = TrialRunner(provider, proxy, ScriptHarness(), config, root / "run")
        task = Task(**{**vars(made), "verify_timeout_s": 120.0})
        trials = (runner.run(TrialRequest(task, f"t{n}", "g", 0, "train")) for n in range(KILLED))
        await asyncio.gather(*trials)

    asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
