"""What a job keeps of Ray's logs when it dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from legorl.errors import OutageError
from legorl.trainer.job import _innermost, _last_words, _reason
from legorl.trainer.outage import NothingToTrainError, nothing_left, stop_at_outage
from tests.tracking.support import broken


def test_the_ends_of_ray_s_logs_are_kept(tmp_path: Path) -> None:
    logs = tmp_path / "session_1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(logs.parent)
    (logs / "raylet.out").write_bytes(b"first\nsecond \xff\nthird\n")
    (logs / "raylet.err").write_text("")
    (logs / "gcs_server.out").write_text("last of the head\n")
    assert _last_words(tmp_path, lines=2).splitlines() == [
        "--- raylet.out",
        "second \ufffd",
        "third",
        "--- gcs_server.out",
        "last of the head",
    ]


def test_no_logs_no_words(tmp_path: Path) -> None:
    assert _last_words(tmp_path) == ""


def test_the_innermost_error_counts() -> None:
    """As Ray delivers what a remote actor raised, through another actor."""
    down = OutageError("registry down: 30 of 32")
    once = RayTaskError("TaskRunner.run", "remote traceback", down).as_instanceof_cause()
    twice = RayTaskError("main", "remote traceback", once).as_instanceof_cause()
    for error in (down, once, twice):
        assert isinstance(_innermost(error), OutageError)
        assert _reason(_innermost(error)) == "OutageError: registry down: 30 of 32"


def test_whose_fault_it_is_that_nothing_is_left() -> None:
    down = [replace(broken(n), detail="registry.invalid: refused") for n in range(3)]
    error = nothing_left(down, "trials of step 4")
    assert isinstance(error, OutageError)
    assert "All 3 trials of step 4 were excluded (sandbox_start 3)" in str(error) and "refused" in str(error)
    late = replace(broken(4), termination="agent_deadline")
    assert isinstance(nothing_left([*down, late], "trials"), NothingToTrainError)
    stop_at_outage(down)
    with pytest.raises(OutageError, match="registry down"):
        stop_at_outage([*down, replace(broken(5), termination="outage", detail="registry down")])
