"""What is known of a finished trial: the content of `trial.json` and of the `trial` event.

Invariant: written once, after grading, with an atomic rename; a trial directory without it is an
interrupted trial.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from legorl.errors import UserError


@dataclass(frozen=True)
class Behaviour:
    """What the agent did, read from its tool calls and their results (not from its words)."""

    submitted: bool = False
    edits: int = 0
    tests_run: int = 0
    retries: int = 0
    """Edits made after a red test run."""
    green_before_end: bool = False
    """The last test run was green."""
    test_after_last_edit: bool = False
    """Every edit was followed by a test run."""

    @property
    def submitted_on_green(self) -> bool:
        """Submitted, and the last thing it knew was a green test run on its final edit."""
        return self.submitted and self.green_before_end and self.test_after_last_edit


@dataclass(frozen=True)
class PhaseRecord:
    """One of the phases setup, agent and verify, as it went."""

    name: str
    start: float
    """Unix seconds."""
    end: float
    attempts: int = 1
    """Each but the first in a fresh sandbox."""
    cause: str = ""
    """What ended it, a termination: of the phase agent its end; empty for another phase that was done."""
    retried: tuple[str, ...] = ()
    """Causes of the attempts before the last."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Causes of all attempts of a setup or verify phase that failed."""
        return self.retried + ((self.cause,) if self.cause and self.name != "agent" else ())


@dataclass(frozen=True)
class Evidence:
    """Something that looks like cheating."""

    rule: str
    """Rule of the integrity policy that it is about."""
    kind: str
    turn: int
    """Number of the reply, from 1; 0 for what was found in what the agent left."""
    text: str
    """The command, the path or the line."""
    stopped: bool = True
    """The rule was on."""


@dataclass(frozen=True)
class TrialRecord:
    """One trial."""

    id: str
    task: str
    group: str
    """Trials of one task in one step."""
    split: str
    step: int
    harness: str
    termination: str
    detail: str
    excluded: bool
    reward: float | None
    """None where nothing was graded."""
    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    rows: int = 0
    weight_version_min: int = -1
    weight_version_max: int = -1
    routing_coverage: float | None = None
    """Share of sampled positions with a routing row; None for a dense policy."""
    violations: tuple[str, ...] = ()
    """Ledger invariants that do not hold; any makes the termination `proxy`."""
    behaviour: Behaviour = field(default_factory=Behaviour)
    policy: str = ""
    """Hash of the integrity policy with its switches."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Rule of the policy -> how often the trial tried what it stops (`legorl.trial.evidence`)."""
    evidence: tuple[Evidence, ...] = ()
    """The first few of these attempts."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds per part: seal, start, connect, agent, snapshot, stop, verify, and total."""
    phases: tuple[PhaseRecord, ...] = ()
    """Those that were begun, in order."""
    path: str = ""
    """Directory of the trial relative to the run directory."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict, field names as here, plus `submitted_on_green`."""
        data = dataclasses.asdict(self)
        data["behaviour"]["submitted_on_green"] = self.behaviour.submitted_on_green
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrialRecord:
        """Inverse of `to_json`; ignores other fields. Raises `ValueError` for a missing or wrong one."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def write_record(record: TrialRecord, directory: Path) -> None:
    """Write `trial.json` atomically."""
    partial = directory / "trial.json.partial"
    partial.write_text(json.dumps(record.to_json(), indent=1))
    partial.rename(directory / "trial.json")


def read_record(directory: Path) -> TrialRecord:
    """Read `trial.json`.

    Raises:
        UserError: no such file (the trial was interrupted), or not a trial record.
    """
    file = directory / "trial.json"
    try:
        return msgspec.convert(json.loads(file.read_bytes()), TrialRecord)
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} has no trial.json: the trial was interrupted, or this is no trial."
        ) from error
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UserError(f"{file} is not a trial record: {error}.") from error
