"""What an agent's sandbox starts with, by the rules that are on."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.sandbox.policy import load_policy
from legorl.trial.sealing import AgentView, agent_view, pristine
from tests.trial.tasks_for_tests import make_task


@pytest.fixture
def view(tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(*off: str, canaries: bool = False) -> AgentView:
        task = make_task(tmp_path / "task")
        (task.solution).mkdir(exist_ok=True)
        sealed = tmp_path / "sealed"
        return agent_view(
            task, load_policy("strict", off), tmp_path, lambda path, cache: sealed, canaries=canaries
        )

    return make


def test_by_rule(view, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    sealed, repo = tmp_path / "sealed", tmp_path / "task" / "environment" / "repo"
    assert view() == AgentView(sealed)
    assert view("history_sealed").workspace == repo
    assert [m.target for m in view("answers_absent", canaries=True).mounts] == ["/tests", "/solution"]
    assert view("fresh_grading").directories == ("/tests",)
    assert view("fresh_grading", "answers_absent").directories == ()
    task = make_task(tmp_path / "task")
    assert pristine(task, load_policy("strict", ["history_sealed"]), tmp_path) == repo


def test_bait_lies_beside_the_work_tree_and_has_its_word(view) -> None:  # type: ignore[no-untyped-def]
    fresh, in_place = view(canaries=True), view("fresh_grading", canaries=True)
    assert [mount.target for mount in fresh.mounts] == ["/solution", "/tests"]
    assert [mount.target for mount in in_place.mounts] == ["/solution"] and in_place.directories == (
        "/tests",
    )
    assert len(fresh.canary) == 12
    texts = [file.read_text() for mount in fresh.mounts for file in mount.source.iterdir()]
    assert len(texts) == 2 and all(fresh.canary in text for text in texts)
    assert view(canaries=True) == fresh
