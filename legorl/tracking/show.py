"""`legorl show`: one run as text. Curves, terminations, slowest phases, example trials, files."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from legorl.tracking.events import Fatal, Heldout, Phase, Pool, Step, Warning
from legorl.tracking.status import RunHistory, run_status
from legorl.trial.archive import interrupted
from legorl.trial.record import TrialRecord
from legorl.trial.termination import TERMINATIONS

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(
    curve: Sequence[tuple[int, float]], *, width: int = 60, height: int = 5, top: float | None = None
) -> list[str]:
    """A bar chart of (step, value), `height` lines and an axis, from 0 (or the least) to `top` (or the most).

    With more points than columns, a column is the mean of its points.
    """
    values = _resample([value for _, value in curve], width)
    low = min(0.0, *values)
    high = top if top is not None else max(*values, low + 1e-9)
    span = (high - low) or 1.0
    stretch = max(1, min(4, width // len(values)))
    lines = []
    for row in reversed(range(height)):
        cells = []
        for value in values:
            filled = (value - low) / span * height - row
            cells.append(_EIGHTHS[round(8 * min(1.0, max(0.0, filled)))] * stretch)
        label = high if row == height - 1 else low if row == 0 else None
        lines.append(f"{'' if label is None else f'{label:.2f}':>8} │{''.join(cells)}")
    first, last = str(curve[0][0]), str(curve[-1][0])
    lines.append(" " * 9 + "└" + "─" * (len(values) * stretch))
    lines.append(" " * 10 + first + last.rjust(max(len(last) + 1, len(values) * stretch - len(first))))
    return lines


def show(history: RunHistory, examples: int = 5) -> str:
    """The whole page."""
    return "\n".join(
        [
            *_head(history),
            *_curves(history),
            *_terminations(history),
            *_integrity(history),
            *_infrastructure(history),
            *_phases(history),
            *_examples(history, examples),
            *_files(history),
        ]
    )


def _head(history: RunHistory) -> Iterator[str]:
    info, status = history.info, run_status(history)
    label = " ".join(filter(None, (info.id, info.name)))
    yield f"run {label}: {info.state}, step {status.step}/{status.steps}, {status.wall_s:.0f} s"
    if info.reason:
        yield f"  reason: {info.reason}"
    if info.choices:
        yield f"  {' '.join(f'{group}={choice}' for group, choice in info.choices.items())}"
    if status.alignment.pearson_min is not None:
        yield (
            f"  alignment: pearson at least {status.alignment.pearson_min:.5f}, "
            f"median {status.alignment.pearson_median:.5f}"
        )
    for event in history.of_kind(Fatal.kind)[-1:]:
        yield f"  fatal: {event['reason']}"
    warnings = history.of_kind(Warning.kind)
    for event in warnings[-3:]:
        yield f"  warning: {event['message']}"
    if len(warnings) > 3:
        yield f"  ({len(warnings) - 3} earlier warnings in events.jsonl)"


def _curves(history: RunHistory) -> Iterator[str]:
    for title, curve in (
        ("reward (training trials)", history.curve("reward/mean")),
        ("held-out success", history.heldout_curve()),
        ("green submissions (held-out)", history.heldout_curve("heldout/green_submission")),
        ("green submissions (training trials)", history.curve("behaviour/green_submission")),
    ):
        if curve:
            yield f"\n{title}: {curve[0][1]:.3f} → {curve[-1][1]:.3f}"
            yield from plot(curve, top=1.0 if max(value for _, value in curve) <= 1 else None)
    if not history.of_kind(Step.kind) and not history.of_kind(Heldout.kind):
        yield "\nno step yet"


def _terminations(history: RunHistory) -> Iterator[str]:
    status = run_status(history)
    if history.trials:
        yield f"\nterminations ({len(history.trials)} trials, {status.excluded} excluded)"
    for name, count in status.terminations.items():
        yield f"  {count:6d}  {name:18} {TERMINATIONS[name].meaning if name in TERMINATIONS else ''}"
    groups = sum(value for _, value in history.curve("groups/count"))
    if groups:
        equal = sum(value for _, value in history.curve("groups/zero_variance"))
        yield f"  {equal:.0f} of {groups:.0f} groups had one reward in all kept trials, so no gradient"


def _infrastructure(history: RunHistory) -> Iterator[str]:
    """What failed around the trials, also where another attempt mended it, and the pools' own numbers."""
    causes: Counter[tuple[str, str]] = Counter()
    again = 0
    for trial in history.trials:
        for phase in trial.phases:
            causes.update((phase.name, cause) for cause in phase.failures)
            again += phase.attempts - 1
    unfinished = [] if history.info.state == "running" else interrupted(history.path)
    if causes or unfinished:
        yield f"\ninfrastructure ({again} attempts at a phase were made again)"
    for (phase_name, cause), count in causes.most_common():
        yield f"  {count:6d}  {phase_name:8} {cause}"
    if unfinished:
        yield f"  {len(unfinished):6d}  interrupted: {TERMINATIONS['interrupted'].meaning}"
    last = {event["pid"]: event for event in history.of_kind(Pool.kind)}
    if last:
        yield "\nsandboxes (operation, count, median, 99 %, failures)"
    for event in last.values():
        for name, each in event["operations"].items():
            failures = " ".join(f"{cause} {count}" for cause, count in each["failures"].items())
            seconds = f"{each['p50_s']:8.3f} s {each['p99_s']:8.3f} s"
            yield f"  {name:10} {each['count']:7d} {seconds}  {failures}".rstrip()


def _integrity(history: RunHistory) -> Iterator[str]:
    suspicious = sum(bool(trial.attempts) for trial in history.trials)
    if suspicious:
        yield f"\n{suspicious} trials tried what a rule of the integrity policy stops"
        yield f"  legorl audit {history.path}"


def _phases(history: RunHistory) -> Iterator[str]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in history.of_kind(Phase.kind):
        seconds[event["name"]].append(event["seconds"])
    for event in history.of_kind(Step.kind):
        for name, value in event["metrics"].items():
            if name.startswith("time_s/") and name != "time_s/step" and value is not None:
                seconds[f"step: {name.removeprefix('time_s/')}"].append(value)
    yield from _slowest("slowest phases of the job", seconds)
    in_trial: dict[str, list[float]] = defaultdict(list)
    for trial in history.trials:
        for name, value in trial.phase_s.items():
            in_trial[name].append(value)
    yield from _slowest("slowest phases of a trial (trials overlap)", in_trial)


def _slowest(title: str, seconds: dict[str, list[float]]) -> Iterator[str]:
    rows = sorted(seconds.items(), key=lambda row: sum(row[1]), reverse=True)[:5]
    if rows:
        yield f"\n{title}"
    for name, values in rows:
        yield f"  {sum(values):8.1f} s  {name:24} {len(values)} x {statistics.fmean(values):.2f} s"


def _examples(history: RunHistory, count: int) -> Iterator[str]:
    chosen = choose_examples(history.trials, count)
    if chosen:
        yield "\nexample trials"
    for trial in chosen:
        reward = "not graded" if trial.reward is None else f"reward {trial.reward:g}"
        yield (
            f"  step {trial.step} {trial.task} ({trial.split}): {trial.termination}, {reward}, "
            f"{trial.turns} turns, {trial.sampled_tokens} tokens"
        )
        yield f"    legorl trial show {history.path / trial.path}"


def choose_examples(trials: Sequence[TrialRecord], count: int) -> list[TrialRecord]:
    """The newest trials, as different as possible in how they ended and what they got."""
    newest = sorted(trials, key=lambda trial: trial.step, reverse=True)
    kinds: dict[tuple[str, bool], list[TrialRecord]] = defaultdict(list)
    for trial in newest:
        kinds[trial.termination, bool(trial.reward)].append(trial)
    rounds = max((len(group) for group in kinds.values()), default=0)
    in_turn = [group[i] for i in range(rounds) for group in kinds.values() if i < len(group)]
    return in_turn[:count]


def _files(history: RunHistory) -> Iterator[str]:
    yield f"\nfiles: {history.path}/"
    for name, meaning in (
        ("config.yaml", "the resolved configuration"),
        ("events.jsonl", "everything that happened"),
        ("job.log", "output of the job"),
        ("trials", "one directory per trial"),
    ):
        if (history.path / name).exists():
            yield f"  {name:14} {meaning}"


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [statistics.fmean(values[start:end]) for start, end in pairwise(edges)]
