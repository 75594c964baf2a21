"""Metrics from trial records: excluded trials count nowhere but as excluded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legorl.tracking.metrics import FAMILIES, METRICS, check_names, heldout_metrics, step_metrics
from legorl.trial.record import PhaseRecord
from tests.tracking.support import broken, trial


def test_means_are_over_kept_trials_only() -> None:
    kept = [trial(0, 1.0), trial(1, 0.0), trial(2, 1.0), trial(3, 0.0)]
    metrics = step_metrics([*kept, broken(4), trial(5, 1.0, excluded=True, termination="agent_deadline")])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5
    assert (metrics["trials/count"], metrics["trials/excluded"]) == (6, 2)
    assert metrics["behaviour/green_submission"] == 0.5 and metrics["behaviour/submitted"] == 1.0
    assert metrics["response/tokens_mean"] == 41.5 and metrics["response/tokens_max"] == 43
    assert metrics["rows/count"] == 4
    assert metrics["termination/sandbox_start"] == 1 and metrics["termination/agent_deadline"] == 1
    assert metrics["phase_s/agent"] == pytest.approx(2.0 + sum([0, 1, 2, 3, 4, 5]) / 6)


def test_phases_with_what_failed_and_was_made_again() -> None:
    setup = [
        PhaseRecord("setup", 0.0, float(n), 1 + n % 2, "", ("transfer",) * (n % 2)) for n in range(1, 101)
    ]
    records = [trial(n, phases=(phase,)) for n, phase in enumerate(setup)]
    died = PhaseRecord("agent", 0.0, 9.0, cause="sandbox_exec")
    records += [replace(broken(200), termination="sandbox_exec", phases=(died,))]
    records += [trial(201, phases=(PhaseRecord("agent", 0.0, 1.0, cause="submitted"),))]
    metrics = step_metrics(records)
    check_names(metrics)
    assert (metrics["phase_p50_s/setup"], metrics["phase_p99_s/setup"]) == (50.0, 99.0)
    assert (metrics["phase_retries/setup"], metrics["phase_retries/agent"]) == (50, 0)
    assert {n: v for n, v in metrics.items() if n.startswith("infrastructure/")} == {
        "infrastructure/transfer": 50,
        "infrastructure/sandbox_exec": 1,
    }


def test_groups() -> None:
    # group g0: trials 0, 2 (rewards 1, 1); g1: trials 1, 3 (0, 1); g9: nothing kept
    records = [trial(0), trial(2), trial(1, 0.0), trial(3), trial(8, None, excluded=True, group="g9")]
    metrics = step_metrics(records)
    assert (metrics["groups/count"], metrics["groups/zero_variance"]) == (3, 1)


def test_without_a_kept_trial_there_are_no_means() -> None:
    metrics = step_metrics([broken(0)])
    assert "reward/mean" not in metrics and metrics["trials/excluded"] == 1
    assert heldout_metrics([broken(0)]) == {"heldout/n": 0}


def test_a_kept_trial_without_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="t7 is kept"):
        step_metrics([trial(7, None)])


def test_heldout() -> None:
    records = [trial(0), trial(1, 0.0), trial(2), broken(3)]
    metrics = heldout_metrics(records)
    assert metrics["heldout/n"] == 3 and metrics["heldout/success"] == pytest.approx(2 / 3)
    assert metrics["heldout/green_submission"] == pytest.approx(2 / 3)


def test_names() -> None:
    check_names([*METRICS, *(f"{family}/x" for family in FAMILIES)])
    check_names(step_metrics([trial(0), broken(1)]) | heldout_metrics([trial(0)]))
    for name in ("reward/maen", "termination/a(b)", "loss"):
        with pytest.raises(ValueError, match="not a metric"):
            check_names([name])
