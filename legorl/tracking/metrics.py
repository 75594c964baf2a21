"""Names and meanings of all metrics, and the ones that follow from trial records.

Invariants: reward and behaviour are means over kept trials only (I5); every name is fit for MLflow, which
drops a whole batch for one name that is not.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from legorl.sandbox.timing import quantile
from legorl.trial.record import TrialRecord
from legorl.trial.termination import TERMINATIONS, Blame, termination

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the kept trials",
    "reward/std": "standard deviation of it over the trials",
    "heldout/success": "mean reward of the kept trials on held-out tasks",
    "heldout/n": "kept held-out trials",
    "heldout/green_submission": "share of held-out trials submitted on a green test run of the final edit",
    "policy/entropy": "mean entropy of the policy per sampled token, nats",
    "policy/kl": "KL estimate between the sampling and the updated policy",
    "policy/clip_fraction": "share of importance ratios that were clipped",
    "policy/grad_norm": "norm of the gradient before clipping",
    "policy/loss": "policy loss",
    "policy/learning_rate": "learning rate of the step",
    "response/tokens_mean": "sampled tokens per trial",
    "response/tokens_max": "most sampled tokens of one trial",
    "turns/mean": "replies of the policy per trial",
    "alignment/pearson": "correlation of sampled tokens' probabilities, engine against trainer",
    "alignment/mean_abs": "mean absolute difference of their log-probabilities",
    "alignment/max_abs": "largest absolute difference of their log-probabilities",
    "alignment/k3_kl": "KL between engine and trainer, k3 estimator",
    "routing/coverage": "share of sampled positions with a routing row from the engine",
    "trials/count": "trials of the step",
    "trials/excluded": "trials left out of every mean and of the loss",
    "groups/count": "groups (tasks) of the step",
    "groups/zero_variance": "groups whose kept trials all have the same reward",
    "integrity/suspicious": "share of trials that tried what a rule of the integrity policy stops",
    "rows/count": "training rows of the kept trials",
    "behaviour/green_submission": "share of trials submitted on a green test run of the final edit",
    "behaviour/submitted": "share of trials that submitted",
    "behaviour/retries": "edits after a red test run, per trial",
    "behaviour/test_after_last_edit": "share of trials whose every edit was tested",
    "behaviour/tests_run": "test runs per trial",
    "staleness/max": "most policy versions a trial lagged behind its update",
    "staleness/mean": "mean of that lag",
    "time_s/step": "wall time of the step",
    "time_s/generate": "wall time of sampling",
    "time_s/old_logprob": "wall time of the trainer's log-probabilities before the update",
    "time_s/update": "wall time of the update",
    "time_s/sync": "wall time of the weight sync",
}

FAMILIES: dict[str, str] = {
    "termination": "trials that ended so (`legorl.trial.termination`)",
    "attempts": "attempts at what this rule of the integrity policy stops, per trial",
    "phase_s": "mean seconds of this part of a trial",
    "phase_p50_s": "median seconds of a phase (setup, agent, verify), its retries included",
    "phase_p99_s": "the longest but one in a hundred",
    "phase_retries": "attempts at this phase beyond the first",
    "infrastructure": "attempts at a phase that this cause ended, those that were made again too",
}
"""Prefix -> meaning, for names that end in one of a set."""

_ALLOWED = re.compile(r"[A-Za-z0-9_\-. :/]+")


def check_names(names: Iterable[str]) -> None:
    """Raises `ValueError` for a metric that is not in the tables: a typo would be a second, silent curve."""
    for name in names:
        known = name in METRICS or name.partition("/")[0] in FAMILIES
        if not known or not _ALLOWED.fullmatch(name):
            raise ValueError(f"{name!r} is not a metric of legorl.tracking.metrics")


def step_metrics(records: Sequence[TrialRecord]) -> dict[str, float]:
    """Metrics of one training step that follow from its trial records.

    Means are left out when no trial was kept. Raises `ValueError` for a kept trial without a reward.
    """
    kept = _kept(records)
    groups: dict[str, set[float]] = defaultdict(set)
    for record, reward in kept:
        groups[record.group].add(reward)
    metrics: dict[str, float] = {
        "trials/count": len(records),
        "trials/excluded": len(records) - len(kept),
        "groups/count": len({record.group for record in records}),
        "groups/zero_variance": sum(len(rewards) == 1 for rewards in groups.values()),
        "rows/count": sum(record.rows for record, _ in kept),
    }
    endings = Counter(record.termination for record in records)
    metrics |= {f"termination/{name}": endings[name] for name in TERMINATIONS}
    metrics |= _attempts(records)
    metrics |= _phase_seconds(records) | _phases(records)
    if kept:
        rewards = [reward for _, reward in kept]
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.pstdev(rewards)
        metrics["response/tokens_mean"] = statistics.fmean(record.sampled_tokens for record, _ in kept)
        metrics["response/tokens_max"] = max(record.sampled_tokens for record, _ in kept)
        metrics["turns/mean"] = statistics.fmean(record.turns for record, _ in kept)
        for name, value in _BEHAVIOUR.items():
            metrics[f"behaviour/{name}"] = statistics.fmean(value(record) for record, _ in kept)
        if coverage := [r.routing_coverage for r, _ in kept if r.routing_coverage is not None]:
            metrics["routing/coverage"] = statistics.fmean(coverage)
    return metrics


def heldout_metrics(records: Sequence[TrialRecord]) -> dict[str, float]:
    """Metrics of one held-out evaluation; `heldout/n` is 0, and the means absent, when no trial was kept."""
    kept = _kept(records)
    metrics: dict[str, float] = {"heldout/n": len(kept)}
    if kept:
        metrics["heldout/success"] = statistics.fmean(reward for _, reward in kept)
        metrics["heldout/green_submission"] = statistics.fmean(
            record.behaviour.submitted_on_green for record, _ in kept
        )
    return metrics


_BEHAVIOUR: Mapping[str, Callable[[TrialRecord], float]] = {
    "green_submission": lambda record: record.behaviour.submitted_on_green,
    "submitted": lambda record: record.behaviour.submitted,
    "retries": lambda record: record.behaviour.retries,
    "test_after_last_edit": lambda record: record.behaviour.test_after_last_edit,
    "tests_run": lambda record: record.behaviour.tests_run,
}


def _attempts(records: Sequence[TrialRecord]) -> dict[str, float]:
    """Also of excluded trials: what they tried was tried."""
    if not records:
        return {}
    count: Counter[str] = Counter()
    for record in records:
        count.update(record.attempts)
    metrics = {f"attempts/{rule}": number / len(records) for rule, number in count.items()}
    return metrics | {"integrity/suspicious": statistics.fmean(bool(record.attempts) for record in records)}


def _kept(records: Sequence[TrialRecord]) -> list[tuple[TrialRecord, float]]:
    kept = []
    for record in records:
        if record.excluded:
            continue
        if record.reward is None:
            raise ValueError(f"trial {record.id} is kept ({record.termination}) but has no reward")
        kept.append((record, record.reward))
    return kept


def _phase_seconds(records: Sequence[TrialRecord]) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for phase, value in record.phase_s.items():
            seconds[phase].append(value)
    return {f"phase_s/{phase}": statistics.fmean(values) for phase, values in seconds.items()}


def _phases(records: Sequence[TrialRecord]) -> dict[str, float]:
    """How long the phases took, and what infrastructure did to them."""
    seconds: dict[str, list[float]] = defaultdict(list)
    retries: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for record in records:
        for phase in record.phases:
            seconds[phase.name].append(phase.end - phase.start)
            retries[phase.name] += phase.attempts - 1
            causes.update(phase.failures)
            if phase.name == "agent" and termination(phase.cause).blame is Blame.INFRASTRUCTURE:
                causes[phase.cause] += 1
    metrics = {f"infrastructure/{cause}": float(count) for cause, count in causes.items()}
    for name, values in seconds.items():
        metrics[f"phase_p50_s/{name}"] = quantile(values, 0.5)
        metrics[f"phase_p99_s/{name}"] = quantile(values, 0.99)
        metrics[f"phase_retries/{name}"] = retries[name]
    return metrics
