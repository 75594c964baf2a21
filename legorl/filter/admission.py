"""Which trials of a step the update sees: pure functions on trial records.

Invariant (I5): a trial that infrastructure ended is neither counted nor kept, whatever the configuration;
the configuration only decides about budget causes and about whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from legorl.config.schema import FilterConfig
from legorl.trial.record import TrialRecord
from legorl.trial.termination import Blame, is_excluded, termination


@dataclass(frozen=True)
class Admission:
    """What becomes of one trial."""

    trial: str
    counted: bool
    """Its reward is in the group's mean and in the step's metrics."""
    kept: bool
    """Its rows are in the loss; implies `counted`."""
    truncated: bool
    """A budget ended it: the reward is the verifier's, but the agent had not finished."""
    reason: str
    """Why it is not kept: a termination, `ungraded`, `small_group` or `zero_variance`; empty when kept."""


@dataclass(frozen=True)
class GroupStats:
    """One group: the trials of one task in one step."""

    group: str
    task: str
    trials: int
    counted: int
    kept: int
    mean: float
    """Of the counted rewards; NaN without any."""
    std: float
    """Sample standard deviation (ddof 1) of the counted rewards; 0 with fewer than two."""
    zero_variance: bool
    """At least two counted trials, all with one reward."""


@dataclass(frozen=True)
class StepAdmission:
    """The decision on one step; `trials` has the order of the records."""

    trials: tuple[Admission, ...]
    groups: tuple[GroupStats, ...]


def _individual(record: TrialRecord, config: FilterConfig) -> Admission:
    truncated = termination(record.termination).blame is Blame.BUDGET
    if is_excluded(record.termination, exclude_agent_deadline=config.exclude_agent_deadline):
        return Admission(record.id, False, False, truncated, record.termination)
    if record.violations:
        return Admission(record.id, False, False, truncated, "proxy")
    if record.reward is None:
        return Admission(record.id, False, False, truncated, "ungraded")
    return Admission(record.id, True, True, truncated, "")


def _group(members: Sequence[tuple[TrialRecord, Admission]], config: FilterConfig) -> tuple[str, GroupStats]:
    """The reason why the whole group is left out (or nothing), and its statistics."""
    rewards = [
        record.reward for record, admission in members if admission.counted and record.reward is not None
    ]
    flat = len(rewards) >= 2 and len(set(rewards)) == 1
    reason = ""
    if len(rewards) < config.min_group:
        reason = "small_group"
    elif flat and config.drop_zero_variance:
        reason = "zero_variance"
    first = members[0][0]
    return reason, GroupStats(
        group=first.group,
        task=first.task,
        trials=len(members),
        counted=len(rewards),
        kept=0 if reason else len(rewards),
        mean=float(np.mean(rewards)) if rewards else float("nan"),
        std=float(np.std(rewards, ddof=1)) if len(rewards) >= 2 else 0.0,
        zero_variance=flat,
    )


def admit(records: Sequence[TrialRecord], config: FilterConfig) -> StepAdmission:
    """Decide about every trial of a step.

    Groups keep the order in which they first appear. A group with fewer than `min_group` counted trials is
    left out of the loss, and one without variance too when `drop_zero_variance`; both stay counted.
    """
    admissions = [_individual(record, config) for record in records]
    members: dict[str, list[int]] = {}
    for index, record in enumerate(records):
        members.setdefault(record.group, []).append(index)
    groups: list[GroupStats] = []
    for indices in members.values():
        reason, stats = _group([(records[i], admissions[i]) for i in indices], config)
        groups.append(stats)
        if reason:
            for i in indices:
                was = admissions[i]
                if was.kept:
                    admissions[i] = Admission(was.trial, True, False, was.truncated, reason)
    return StepAdmission(tuple(admissions), tuple(groups))
