"""Capture: order, progress, and lasting failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from legorl.errors import InfrastructureError
from legorl.trial.capture import ATTEMPTS, capture
from legorl.trial.runner import TrialRequest, TrialResult
from tests.trial.tasks_for_tests import make_task
from tests.trial.test_record import RECORD


class Runner:
    """Ends trials at once; those whose id is in `failing` by infrastructure."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing, self.seen = failing, list[TrialRequest]()
        self.run_dir = Path("run")

    async def run(self, request: TrialRequest) -> TrialResult:
        self.seen.append(request)
        failed = any(request.trial_id.startswith(name) for name in self.failing)
        record = replace(RECORD, id=request.trial_id, task=request.task.id)
        return TrialResult(replace(record, excluded=True, termination="engine") if failed else record, [])


async def test_round_robin_in_order(tmp_path: Path) -> None:
    tasks = [make_task(tmp_path / name, id=name) for name in "ab"]
    seen: list[tuple[int, int]] = []
    got = await capture(tasks, 5, Runner(), label="skill", progress=lambda *at: seen.append(at))  # type: ignore[arg-type]
    assert [record.task for record, _ in got] == list("ababa")
    assert [record.id for record, _ in got][:2] == ["skill-00000", "skill-00001"]
    assert seen == [(done, 5) for done in range(1, 6)]


async def test_a_failed_episode_is_run_again(tmp_path: Path) -> None:
    class Once(Runner):
        async def run(self, request: TrialRequest) -> TrialResult:
            self.failing = () if "again" in request.trial_id else ("x-00001",)
            return await super().run(request)

    runner = Once()
    got = await capture([make_task(tmp_path)], 2, runner, label="x")  # type: ignore[arg-type]
    assert [record.id for record, _ in got] == ["x-00000", "x-00001-again1"]


async def test_a_lasting_failure_ends_it(tmp_path: Path) -> None:
    runner = Runner(("x-00001",))
    with pytest.raises(InfrastructureError, match=f"failed {ATTEMPTS} times, at last with engine"):
        await capture([make_task(tmp_path)], 3, runner, label="x")  # type: ignore[arg-type]
    assert sum(request.trial_id.startswith("x-00001") for request in runner.seen) == ATTEMPTS
