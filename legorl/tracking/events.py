"""`events.jsonl`: what happened in a run, one JSON object per line, in order.

Invariant: append-only, one `write` per line, so several processes may append and a reader sees whole lines,
but for a torn last one after a crash. A line is `{"t": unix seconds, "kind": ..., **fields}`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from legorl.trial.record import TrialRecord

EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True)
class Start:
    """The job runs."""

    kind: ClassVar[str] = "start"
    steps: int
    resumed_at: int = 0
    """Step the job continues from, 0 for a new run."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Of integrity: name, hash, and the rules that are off."""


@dataclass(frozen=True)
class Phase:
    """A phase of the job outside its steps ended: `warm_start`, `engine_start`, …"""

    kind: ClassVar[str] = "phase"
    name: str
    seconds: float


@dataclass(frozen=True)
class Trial:
    """A trial ended."""

    kind: ClassVar[str] = "trial"
    record: TrialRecord


@dataclass(frozen=True)
class Step:
    """A training step ended; names of the metrics are in `legorl.tracking.metrics`."""

    kind: ClassVar[str] = "step"
    step: int
    metrics: Mapping[str, float | None]
    """None for what was not a number."""


@dataclass(frozen=True)
class Heldout:
    """A held-out evaluation ended. `success` is a mean over the `n` kept trials."""

    kind: ClassVar[str] = "heldout"
    step: int
    success: float | None
    n: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Canary:
    """Log-probabilities of a fixed text after a weight sync, engine against trainer."""

    kind: ClassVar[str] = "canary"
    step: int
    max_abs: float | None
    ok: bool


@dataclass(frozen=True)
class Pool:
    """What the sandbox pool of a process did so far: `legorl.sandbox.pool.PoolStats`."""

    kind: ClassVar[str] = "pool"
    pid: int
    in_use: int
    warm: int
    warm_used: int
    breaker: str
    operations: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Warning:
    """Something a person should know; the run goes on."""

    kind: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True)
class Fatal:
    """Why the job cannot go on."""

    kind: ClassVar[str] = "fatal"
    reason: str


@dataclass(frozen=True)
class End:
    """The job is done."""

    kind: ClassVar[str] = "end"
    step: int


Event = Start | Phase | Trial | Step | Heldout | Canary | Pool | Warning | Fatal | End

KINDS: dict[str, type[Event]] = {
    kind.kind: kind for kind in (Start, Phase, Trial, Step, Heldout, Canary, Pool, Warning, Fatal, End)
}

_FSYNC = {Step.kind, Heldout.kind, Fatal.kind, End.kind}


class EventLog:
    """Writer; each process of the job has its own."""

    def __init__(self, run_dir: Path) -> None:
        self._fd = os.open(
            run_dir / EVENTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        if (size := os.fstat(self._fd).st_size) and _last_byte(run_dir / EVENTS_FILE, size) != b"\n":
            os.write(self._fd, b"\n")  # a resumed run: the torn line of the crash stays alone

    def write(self, event: Event) -> None:
        """Append one event; fsynced when it ends a step or the run. Raises `OSError` (disk full)."""
        fields = event.record.to_json() if isinstance(event, Trial) else dataclasses.asdict(event)
        # JSON has no NaN: a metric that is not a number becomes null.
        line = json.dumps({"t": time.time(), "kind": event.kind, **_finite(fields)}, allow_nan=False) + "\n"
        data = memoryview(line.encode())
        while data:
            data = data[os.write(self._fd, data) :]
        if event.kind in _FSYNC:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; more than once is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class EventReader:
    """Reads a growing log: each call of `new` gives the events that are whole since the last call."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / EVENTS_FILE
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Events as dicts, with `t` and `kind`; lines that are not whole JSON objects are skipped."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue  # torn by a crash, then resumed
            if isinstance(event, dict) and "kind" in event:
                yield event


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """All events so far; empty when there is no log yet."""
    return list(EventReader(run_dir).new())


def check_event(event: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a line without its time or a field of its kind, or with a wrong one.

    Kinds and fields that this version does not know are left alone.
    """
    kind = KINDS.get(event["kind"]) if isinstance(event["kind"], str) else None
    fields: Mapping[str, Any] = {"record": event} if kind is Trial else event
    try:
        msgspec.convert(event.get("t"), float)
        if kind is not None:
            msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{event['kind']}: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _last_byte(file: Path, size: int) -> bytes:
    with file.open("rb") as handle:
        handle.seek(size - 1)
        return handle.read(1)
