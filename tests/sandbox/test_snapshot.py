"""Reading an upper layer, written by hand: what needs no overlay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from legorl.sandbox import snapshot
from legorl.sandbox.base import Snapshot

OPAQUE = "user.overlay.opaque"


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    root = tmp_path / "lower"
    (root / "d").mkdir(parents=True)
    (root / "a").write_text("a\n")
    (root / "d" / "b").write_text("b\n")
    return root


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    (tmp_path / "upper").mkdir()
    return tmp_path / "upper"


def take(upper: Path, lower: Path) -> Snapshot:
    fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return snapshot.take_snapshot(fd, lower, OPAQUE)
    finally:
        os.close(fd)


def test_an_untouched_workspace(upper: Path, lower: Path) -> None:
    assert take(upper, lower) == Snapshot({}, {}, "", ())


def test_a_copy_without_change_is_no_change(upper: Path, lower: Path) -> None:
    (upper / "a").write_text("a\n")
    (upper / "a").chmod(0o600)
    assert take(upper, lower).changed == {}


def test_modes_are_permission_bits(upper: Path, lower: Path) -> None:
    (upper / "new").write_text("x")
    (upper / "new").chmod(0o750)
    (upper / "link").symlink_to("a")
    assert take(upper, lower).modes == {"new": 0o750, "link": 0o120777}


def test_an_opaque_directory_hides_the_one_below(upper: Path, lower: Path) -> None:
    (upper / "d").mkdir()
    (upper / "d" / "c").write_text("c\n")
    try:
        os.setxattr(upper / "d", OPAQUE, b"y")
    except OSError:
        pytest.skip("the file system of the temporary directory has no user attributes")
    assert take(upper, lower).changed == {"d/b": None, "d/c": b"c\n"}


def test_an_oversize_file_counts_as_unchanged(
    upper: Path, lower: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "FILE_BYTES", 10)
    (upper / "a").write_text("x" * 11)
    (upper / "fits").write_text("x" * 10)
    result = take(upper, lower)
    assert list(result.changed) == ["fits"]
    assert result.skipped == ("a",)


def test_the_total_is_bounded(upper: Path, lower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "TOTAL_BYTES", 25)
    for name in "uvwx":
        (upper / name).write_text("0123456789")
    result = take(upper, lower)
    assert len(result.changed) == 2
    assert len(result.skipped) == 2


def test_the_number_of_entries_is_bounded(upper: Path, lower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "ENTRIES", 5)
    for i in range(50):
        (upper / str(i)).write_text("x")
    result = take(upper, lower)
    assert len(result.changed) == 5
    assert len(result.skipped) == 1


def test_special_files_are_named(upper: Path, lower: Path) -> None:
    os.mkfifo(upper / "a")
    result = take(upper, lower)
    assert result.changed == {"a": None}
    assert result.skipped == ("a",)
