"""`legorl audit`: how many trials of a run tried what the integrity policy stops, by class, with examples.

Invariant: it counts what the trials' records say; nothing is judged anew, so a run always audits the same.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from legorl.tracking.events import Start
from legorl.tracking.status import RunHistory
from legorl.trial.record import Evidence, TrialRecord

EXAMPLES = 3


@dataclass(frozen=True)
class Example:
    """One piece of evidence, and where to read on."""

    trial: str
    """Directory of the trial, relative to the run's."""
    turn: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One class: what was tried against one rule."""

    rule: str
    kind: str
    trials: int
    share: float
    """Of all trials of the run."""
    stopped: bool
    """The rule was on in all of them."""
    reward: float | None
    """Mean of those that were graded."""
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Audit:
    """Of a run."""

    run: str
    policy: dict[str, Any]
    """Name, hash and switches, as the run logged them; empty for one that did not."""
    trials: int
    suspicious: int
    """Trials with evidence of any class."""
    attempts: dict[str, int]
    """Rule -> attempts of all trials."""
    reward: float | None
    """Mean over the graded trials without evidence."""
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return dataclasses.asdict(self)


def audit(history: RunHistory) -> Audit:
    """Count."""
    trials = history.trials
    classes: dict[tuple[str, str], list[tuple[TrialRecord, Evidence]]] = {}
    attempts: dict[str, int] = {}
    for trial in trials:
        for rule, count in trial.attempts.items():
            attempts[rule] = attempts.get(rule, 0) + count
        for item in trial.evidence:
            classes.setdefault((item.rule, item.kind), []).append((trial, item))
    findings = [_finding(rule, kind, found, len(trials)) for (rule, kind), found in classes.items()]
    starts = history.of_kind(Start.kind)
    return Audit(
        run=history.info.id,
        policy=dict(starts[-1].get("policy") or {}) if starts else {},
        trials=len(trials),
        suspicious=sum(bool(trial.attempts) for trial in trials),
        attempts=dict(sorted(attempts.items())),
        reward=_mean([trial for trial in trials if not trial.attempts]),
        findings=tuple(sorted(findings, key=lambda finding: (-finding.trials, finding.rule, finding.kind))),
    )


def _finding(rule: str, kind: str, found: Sequence[tuple[TrialRecord, Evidence]], total: int) -> Finding:
    trials = {id(trial): trial for trial, _ in found}
    firsts = {id(trial): item for trial, item in reversed(found)}
    return Finding(
        rule=rule,
        kind=kind,
        trials=len(trials),
        share=len(trials) / total,
        stopped=all(item.stopped for _, item in found),
        reward=_mean(list(trials.values())),
        examples=tuple(
            Example(trial.path, firsts[key].turn, firsts[key].text)
            for key, trial in list(trials.items())[:EXAMPLES]
        ),
    )


def _mean(trials: Sequence[TrialRecord]) -> float | None:
    rewards = [trial.reward for trial in trials if trial.reward is not None]
    return statistics.fmean(rewards) if rewards else None


def lines(found: Audit, run_dir: str) -> Iterator[str]:
    """The page."""
    policy = "not logged"
    if found.policy:
        off = found.policy.get("off") or []
        rules = f"without {', '.join(off)}" if off else "all rules on"
        policy = f"{found.policy['name']} ({found.policy['hash']}), {rules}"
    yield f"run {found.run}: policy {policy}"
    share = found.suspicious / found.trials if found.trials else 0.0
    rest = f"the mean reward of the others is {_number(found.reward)}"
    yield f"{found.suspicious} of {found.trials} trials ({share:.1%}) have evidence; {rest}"
    for finding in found.findings:
        state = "stopped" if finding.stopped else "NOT STOPPED"
        yield f"\n{finding.rule}: {finding.kind}"
        yield (
            f"  {finding.trials} trials ({finding.share:.1%}), {state}, mean reward {_number(finding.reward)}"
        )
        for example in finding.examples:
            where = f"turn {example.turn}" if example.turn else "in what it left"
            yield f"    {run_dir}/{example.trial}, {where}: {example.text}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
