"""What a trial leaves on disk, besides `trial.json`.

    started.json
    trial.json  segments.npz  messages.jsonl.zst  model.patch  harness.log  error.txt  verifier/

Invariant: `trial.json` comes last, so a directory with it is complete; one without belongs to a trial that is
under way or, when its process is gone, to one that was interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from legorl.errors import InfrastructureError
from legorl.proxy.store import save
from legorl.proxy.transcript import Transcript
from legorl.sandbox.base import ExecResult, Snapshot
from legorl.trial.record import TrialRecord, write_record
from legorl.trial.verify import Verification

_LOG_BYTES = 200_000
_STARTED = "started.json"


@dataclass(frozen=True)
class Started:
    """Content of `started.json`, which a trial has until it is over."""

    id: str
    task: str
    group: str
    split: str
    step: int
    harness: str
    start: float
    """Unix seconds."""


@dataclass(frozen=True)
class Remains:
    """What there is to write; None for what a trial never reached."""

    ledger: Transcript | None = None
    harness: ExecResult | None = None
    snapshot: Snapshot | None = None
    verification: Verification | None = None
    traceback: str = ""


def trial_directory(run_dir: Path, step: int, trial_id: str) -> Path:
    """Where a trial's files lie."""
    return run_dir / "trials" / f"step_{step:04d}" / trial_id


def mark_started(directory: Path, started: Started) -> None:
    """Say that a trial is under way.

    Raises:
        InfrastructureError: the disk is full, or the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "trial.json").unlink(missing_ok=True)
        (directory / _STARTED).write_text(json.dumps(dataclasses.asdict(started)))
    except OSError as error:
        raise _not_recorded(started.id, directory, error) from error


def interrupted(run_dir: Path) -> list[TrialRecord]:
    """Records of the trials that were begun and never ended; of a run that goes on, those under way too."""
    records = []
    for file in sorted((run_dir / "trials").glob(f"step_*/*/{_STARTED}")):
        directory = file.parent
        try:
            started = Started(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # it has just ended, or was killed while this was written: nothing is known of it
        records.append(
            TrialRecord(
                id=started.id,
                task=started.task,
                group=started.group,
                split=started.split,
                step=started.step,
                harness=started.harness,
                termination="interrupted",
                detail="The process that ran the trial was killed.",
                excluded=True,
                reward=None,
                path=str(directory.relative_to(run_dir)),
            )
        )
    return records


def write_trial(record: TrialRecord, remains: Remains, directory: Path) -> None:
    """Write everything, the record last. What an earlier attempt at the same trial left is replaced.

    Raises:
        InfrastructureError: the disk is full, or the directory cannot be written.
    """
    try:
        (directory / "trial.json").unlink(missing_ok=True)  # from here on it says that it is not complete
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        if remains.ledger is not None:
            save(remains.ledger, directory)
        if remains.harness is not None:
            (directory / "harness.log").write_bytes(_log(remains.harness))
        if remains.snapshot is not None:
            (directory / "model.patch").write_bytes(os.fsencode(remains.snapshot.patch))
        if remains.verification is not None:
            _write_verification(remains.verification, directory / "verifier")
        if remains.traceback:
            (directory / "error.txt").write_text(remains.traceback)
        write_record(record, directory)
    except OSError as error:
        raise _not_recorded(record.id, directory, error) from error


def _not_recorded(trial: str, directory: Path, error: OSError) -> InfrastructureError:
    return InfrastructureError(
        f"Trial {trial} could not be recorded in {directory}: {error}. Free space there, "
        "or point paths.runs to another disk."
    )


def _log(result: ExecResult) -> bytes:
    head = f"exit code {result.code} after {result.seconds:.2f} s\n".encode()
    parts = (
        b"--- stdout ---\n" + result.stdout[-_LOG_BYTES:],
        b"\n--- stderr ---\n" + result.stderr[-_LOG_BYTES:],
    )
    return head + b"".join(parts)


def _write_verification(verification: Verification, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "output.txt").write_bytes(verification.output[-_LOG_BYTES:])
    summary = {
        "reward": verification.reward,
        "detail": verification.detail,
        "passed": list(verification.passed),
        "failed": dict(verification.failed),
        "rolled_back": list(verification.rolled_back),
        "skipped": list(verification.skipped),
        "seconds": verification.seconds,
    }
    (directory / "result.json").write_text(json.dumps(summary, indent=1))
