"""Admission: the table of terminations, groups, and what no configuration can loosen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.config.schema import FilterConfig
from legorl.filter.admission import admit
from legorl.trial.record import TrialRecord
from legorl.trial.termination import TERMINATIONS, Blame


def record(
    index: int, reward: float | None, termination: str = "submitted", group: str = "g", **extra: object
) -> TrialRecord:
    return TrialRecord(
        id=f"t{index}", task=f"task-{group}", group=group, split="train", step=1, harness="h",
        termination=termination, detail="", excluded=False, reward=reward, **extra,  # type: ignore[arg-type]
    )  # fmt: skip


PAPER = FilterConfig(name="paper")
NONE = FilterConfig(name="none", exclude_agent_deadline=False, drop_zero_variance=False, min_group=1)


def test_a_mixed_group_is_kept() -> None:
    step = admit([record(0, 1.0), record(1, 0.0), record(2, 0.0, "turn_limit")], PAPER)
    assert [a.kept for a in step.trials] == [True, True, True]
    assert [a.truncated for a in step.trials] == [False, False, True]
    (group,) = step.groups
    assert (group.trials, group.counted, group.kept) == (3, 3, 3)
    assert group.mean == pytest.approx(1 / 3) and group.std == pytest.approx(math.sqrt(1 / 3))


def test_zero_variance_is_counted_but_not_kept() -> None:
    records = [record(0, 1.0), record(1, 1.0)]
    step = admit(records, PAPER)
    assert [(a.counted, a.kept, a.reason) for a in step.trials] == [(True, False, "zero_variance")] * 2
    assert step.groups[0].zero_variance and step.groups[0].mean == 1.0
    assert all(a.kept for a in admit(records, NONE).trials)


def test_an_excluded_trial_is_out_of_the_group() -> None:
    """Without the failed trial the other two have one reward: no variance is left."""
    step = admit([record(0, 1.0), record(1, 1.0), record(2, None, "engine")], PAPER)
    assert [a.reason for a in step.trials] == ["zero_variance", "zero_variance", "engine"]
    assert (step.groups[0].mean, step.groups[0].counted) == (1.0, 2)


def test_a_small_group_is_left_out() -> None:
    step = admit([record(0, 1.0), record(1, None, "sandbox_start")], PAPER)
    assert [a.reason for a in step.trials] == ["small_group", "sandbox_start"]
    assert step.groups[0].kept == 0 and step.groups[0].std == 0.0


def test_agent_deadline_is_an_option() -> None:
    records = [record(0, 1.0), record(1, 0.0, "agent_deadline")]
    assert [a.counted for a in admit(records, PAPER).trials] == [True, False]
    assert [a.kept for a in admit(records, NONE).trials] == [True, True]


def test_violations_exclude_whatever_the_termination_says() -> None:
    step = admit([record(0, 1.0, violations=("I2 token twice",)), record(1, 0.0)], NONE)
    assert (step.trials[0].counted, step.trials[0].reason) == (False, "proxy")


def test_an_empty_group_has_no_mean() -> None:
    step = admit([record(0, None, "engine")], PAPER)
    assert math.isnan(step.groups[0].mean)


@pytest.mark.parametrize("name", [n for n, t in TERMINATIONS.items() if t.blame is Blame.INFRASTRUCTURE])
def test_no_configuration_admits_infrastructure(name: str) -> None:
    step = admit([record(0, 1.0, name), record(1, 0.0)], NONE)
    assert not step.trials[0].counted and not step.trials[0].kept
    assert step.groups[0].mean == 0.0


@pytest.mark.parametrize("name", [n for n, t in TERMINATIONS.items() if t.blame is Blame.POLICY])
def test_what_the_policy_did_is_always_counted(name: str) -> None:
    step = admit([record(0, 1.0, name), record(1, 0.0)], PAPER)
    assert step.trials[0].kept and step.trials[1].kept


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from(sorted(TERMINATIONS)), st.sampled_from("ab"))
    )
)
def test_order_of_records_does_not_matter(rows: list[tuple[float, str, str]]) -> None:
    records = [record(i, r, t, g) for i, (r, t, g) in enumerate(rows)]
    straight = {a.trial: a for a in admit(records, PAPER).trials}
    backward = {a.trial: a for a in admit(records[::-1], PAPER).trials}
    assert straight == backward
    assert all(a.counted for a in straight.values() if a.kept)
    assert all(bool(a.reason) is not a.kept for a in straight.values())
