"""Records on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.errors import InfrastructureError, UserError
from legorl.sandbox.base import ExecResult, Snapshot
from legorl.trial.archive import Remains, trial_directory, write_trial
from legorl.trial.record import Behaviour, TrialRecord, read_record

RECORD = TrialRecord(
    id="t1", task="a", group="g", split="train", step=7, harness="h", termination="submitted", detail="",
    excluded=False, reward=1.0, violations=("one",), phase_s={"agent": 1.5}, path="trials/step_0007/t1",
    behaviour=Behaviour(True, edits=1, tests_run=1, green_before_end=True, test_after_last_edit=True),
)  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    directory = trial_directory(tmp_path, 7, "t1")
    snapshot = Snapshot({"a": b"\xff"}, {"a": 0o644}, "diff --git a/\udcff b/\udcff\n")
    harness = ExecResult(1, b"out", b"err", 0.5)
    write_trial(RECORD, Remains(harness=harness, snapshot=snapshot, traceback="Traceback"), directory)
    assert read_record(directory) == RECORD
    assert RECORD.to_json()["behaviour"]["submitted_on_green"] is True
    assert (directory / "model.patch").read_bytes() == b"diff --git a/\xff b/\xff\n"
    assert "exit code 1" in (directory / "harness.log").read_text()


def test_a_directory_without_a_record_is_an_interrupted_trial(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="interrupted"):
        read_record(tmp_path)
    (tmp_path / "trial.json").write_text('{"id": 1}')
    with pytest.raises(UserError, match="not a trial record"):
        read_record(tmp_path)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("a file where the directory belongs")
    with pytest.raises(InfrastructureError, match="could not be recorded"):
        write_trial(RECORD, Remains(), trial_directory(tmp_path, 7, "t1"))


def test_an_earlier_attempt_is_replaced(tmp_path: Path) -> None:
    write_trial(RECORD, Remains(traceback="Traceback"), tmp_path / "t1")
    write_trial(RECORD, Remains(), tmp_path / "t1")
    assert [file.name for file in (tmp_path / "t1").iterdir()] == ["trial.json"]
