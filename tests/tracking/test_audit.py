"""`legorl audit`: prevalence per class, with examples that lead to the trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legorl.cli import main
from legorl.sandbox.policy import load_policy
from legorl.tracking.events import EventLog, Start, Trial
from legorl.tracking.metrics import check_names, step_metrics
from legorl.trial.record import Evidence
from tests.tracking.support import make_history, trial

LOOKED = Evidence("history_sealed", "history reading", 2, "git log --all -p")
EDITED = Evidence("tests_restored", "edited tests", 0, "tests/test_cart.py", stopped=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = make_history(tmp_path / "runs", steps=1)
    log = EventLog(path)
    log.write(Start(1, 0, load_policy("strict", ["tests_restored"]).summary()))
    log.write(Trial(trial(20, 0.0, attempts={"history_sealed": 3}, evidence=(LOOKED, LOOKED))))
    log.write(Trial(trial(21, 1.0, attempts={"tests_restored": 1}, evidence=(EDITED,))))
    log.close()
    return path


def test_the_page(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--runs", str(run_dir.parent)]) == 0
    page = capsys.readouterr().out
    assert "without tests_restored" in page and "2 of 15 trials (13.3%)" in page
    assert "1 trials (6.7%), stopped, mean reward 0.00" in page and "NOT STOPPED, mean reward 1.00" in page
    assert f"{run_dir}/trials/step_0001/t20, turn 2: git log --all -p" in page
    assert "t21, in what it left: tests/test_cart.py" in page


def test_for_programs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["attempts"] == {"history_sealed": 3, "tests_restored": 1}
    assert found["policy"]["hash"] == load_policy("strict", ["tests_restored"]).hash
    assert [f["rule"] for f in found["findings"]] == ["history_sealed", "tests_restored"]
    assert main(["show", str(run_dir)]) == 0
    assert "2 trials tried what" in capsys.readouterr().out


def test_metrics_count_attempts() -> None:
    got = step_metrics([trial(0), trial(1, attempts={"history_sealed": 3})])
    check_names(got)
    assert (got["attempts/history_sealed"], got["integrity/suspicious"]) == (1.5, 0.5)
