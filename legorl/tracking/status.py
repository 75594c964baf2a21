"""What became of a run, in numbers, from `run.json` and `events.jsonl`; also of one that goes on or broke."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legorl.config.rundir import RunInfo, live_info
from legorl.errors import UserError
from legorl.tracking.events import EVENTS_FILE, Heldout, Step, Trial, check_event, read_events
from legorl.trial.record import TrialRecord


@dataclass(frozen=True)
class Change:
    """First and last value of a curve, None without any."""

    first: float | None
    last: float | None


@dataclass(frozen=True)
class HeldoutChange(Change):
    """Likewise; `n` kept trials in the last evaluation."""

    n: int


@dataclass(frozen=True)
class Alignment:
    """Engine against trainer over the steps; `mean_abs` is the mean over the steps. None without any."""

    pearson_min: float | None
    pearson_median: float | None
    mean_abs: float | None


@dataclass(frozen=True)
class RunStatus:
    """One entry of `legorl status --json`. Trials of held-out evaluations count in `terminations`."""

    id: str
    state: str
    reason: str
    name: str
    step: int
    steps: int
    reward: Change
    heldout: HeldoutChange
    alignment: Alignment
    terminations: dict[str, int]
    excluded: int
    wall_s: float
    path: str


@dataclass(frozen=True)
class RunHistory:
    """Everything the event log of one run says."""

    info: RunInfo
    path: Path
    events: list[dict[str, Any]]
    trials: list[TrialRecord] = field(default_factory=list)

    @classmethod
    def read(cls, run_dir: Path) -> RunHistory:
        """Raises `UserError` when `run_dir` is no run, or its log holds an event that is none."""
        info = live_info(run_dir)
        try:
            events = read_events(run_dir)
            for event in events:
                check_event(event)
            trials = [TrialRecord.from_json(event) for event in events if event["kind"] == Trial.kind]
        except (OSError, ValueError) as error:
            raise UserError(
                f"{run_dir / EVENTS_FILE} cannot be read ({error}). It is damaged, or from another version."
            ) from error
        return cls(info, run_dir, events, trials)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric of the training steps."""
        return _last_of_step(
            (event["step"], event["metrics"].get(metric)) for event in self.of_kind(Step.kind)
        )

    def heldout_curve(self, metric: str = "heldout/success") -> list[tuple[int, float]]:
        """(step, value) of a metric of the held-out evaluations."""
        if metric == "heldout/success":
            return _last_of_step((event["step"], event["success"]) for event in self.of_kind(Heldout.kind))
        return _last_of_step((e["step"], e["metrics"].get(metric)) for e in self.of_kind(Heldout.kind))

    def wall_s(self) -> float:
        """Seconds to the end; to now while it runs; to the last event of one that was killed."""
        if self.info.ended is not None:
            end = self.info.ended
        elif self.info.state == "running":
            end = time.time()
        else:
            end = max([self.info.created, *(event["t"] for event in self.events[-1:])])
        return max(0.0, end - self.info.created)  # the clock may have been set back


def run_status(history: RunHistory) -> RunStatus:
    """The summary."""
    info = history.info
    heldout = history.of_kind(Heldout.kind)
    pearson = [value for _, value in history.curve("alignment/pearson")]
    mean_abs = [value for _, value in history.curve("alignment/mean_abs")]
    success = history.heldout_curve()
    return RunStatus(
        id=info.id,
        state=info.state,
        reason=info.reason,
        name=info.name,
        step=max((event["step"] for event in history.of_kind(Step.kind)), default=0),
        steps=info.steps,
        reward=_change(history.curve("reward/mean")),
        heldout=HeldoutChange(*_ends(success), n=int(heldout[-1]["n"]) if heldout else 0),
        alignment=Alignment(
            pearson_min=min(pearson, default=None),
            pearson_median=statistics.median(pearson) if pearson else None,
            mean_abs=statistics.fmean(mean_abs) if mean_abs else None,
        ),
        terminations=dict(Counter(trial.termination for trial in history.trials).most_common()),
        excluded=sum(trial.excluded for trial in history.trials),
        wall_s=round(history.wall_s(), 1),
        path=str(history.path),
    )


def _last_of_step(points: Any) -> list[tuple[int, float]]:
    """Without absent values; a step that was done again after a resume has its later value."""
    return sorted({int(step): float(value) for step, value in points if value is not None}.items())


def _ends(curve: Sequence[tuple[int, float]]) -> tuple[float | None, float | None]:
    return (curve[0][1], curve[-1][1]) if curve else (None, None)


def _change(curve: Sequence[tuple[int, float]]) -> Change:
    return Change(*_ends(curve))
