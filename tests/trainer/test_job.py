"""What a job keeps of Ray's logs when it dies."""

from __future__ import annotations

from pathlib import Path

from legorl.errors import OutageError
from legorl.trainer.job import _innermost, _last_words, _reason


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
    class Wrapped(RuntimeError):
        cause = OutageError("registry down: 30 of 32")

    assert isinstance(_innermost(Wrapped("remote traceback")), OutageError)
    assert _reason(_innermost(Wrapped("x"))) == "OutageError: registry down: 30 of 32"
    assert isinstance(_innermost(OutageError("its cause is a word")), OutageError)
