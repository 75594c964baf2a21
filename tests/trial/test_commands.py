"""`legorl trial run` as typed wrongly: one message, and nothing is opened or lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.cli import main


def test_an_earlier_record_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "trials" / "step_0000" / "one" / "trial.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert main(["trial", "run", "any", "--expert", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} has a trial's record already" in capsys.readouterr().err
    assert record.read_text() == "{}"


def test_a_path_that_is_no_task_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, why in ((tmp_path, "it has no task.toml"), (tmp_path / "nope", "it does not exist")):
        assert main(["trial", "run", str(path), "--expert"]) == 2
        assert f"{path} is no task directory: {why}." in capsys.readouterr().err
