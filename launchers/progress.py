"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from legorl.tracking.events import Canary, Fatal, Heldout, Phase, Step, Trial, Warning


class Display:
    """Shows events as they arrive."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._trials = 0
        self._heldout: float | None = None
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[now]}"),
                TimeElapsedColumn(),
            )
            self._task = self._bar.add_task(f"step 0/{steps}", total=steps, now="starting")

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def line(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def show(self, event: Mapping[str, Any]) -> None:
        """One event of `events.jsonl`."""
        kind = event["kind"]
        if kind == Step.kind:
            self._trials = 0
            self.line(step_line(event, self._steps, self._heldout))
            if self._bar:
                self._bar.update(self._task, description=f"step {event['step']}/{self._steps}", now="")
                self._bar.update(self._task, completed=event["step"])
        elif kind == Heldout.kind:
            self._heldout = event["success"]
            self.line(
                f"held-out at step {event['step']}: {_number(event['success'], 3)} of {event['n']} trials"
            )
        elif kind == Phase.kind:
            self.line(f"{event['name']} {event['seconds']:.1f}s")
        elif kind == Trial.kind:
            self._trials += 1
            if self._bar:
                self._bar.update(self._task, now=f"{self._trials} trials")
        elif kind == Warning.kind:
            self.line(f"warning: {event['message']}")
        elif kind == Fatal.kind:
            self.line(f"fatal: {event['reason']}")
        elif kind == Canary.kind and not event["ok"]:
            self.line(f"weight sync of step {event['step']} is off: canary differs by {event['max_abs']}")


def step_line(event: Mapping[str, Any], steps: int, heldout: float | None) -> str:
    """`step 3/24 reward 0.41 heldout 0.39 pearson 0.9998 trials 64 excluded 0 18.2s`."""
    metrics = event["metrics"]
    parts = [
        f"step {event['step']}/{steps}",
        f"reward {_number(metrics.get('reward/mean'), 2)}",
        f"heldout {_number(heldout, 2)}",
        f"pearson {_number(metrics.get('alignment/pearson'), 4)}",
        f"trials {_number(metrics.get('trials/count'), 0)}",
        f"excluded {_number(metrics.get('trials/excluded'), 0)}",
        f"{_number(metrics.get('time_s/step'), 1)}s",
    ]
    return " ".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
