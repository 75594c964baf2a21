"""Patches: git is the judge."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legorl.sandbox.patch import Blob, file_patch

FILE = stat.S_IFREG | 0o644
EXECUTABLE = stat.S_IFREG | 0o755
LINK = stat.S_IFLNK | 0o777


def write(path: Path, blob: Blob | None) -> None:
    if path.is_symlink() or path.exists():
        path.unlink()
    if blob is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(blob.mode):
        path.symlink_to(os.fsdecode(blob.data))
    else:
        path.write_bytes(blob.data)
        path.chmod(stat.S_IMODE(blob.mode))


def read(path: Path) -> Blob | None:
    if path.is_symlink():
        return Blob(os.fsencode(path.readlink()), LINK)
    return Blob(path.read_bytes(), path.stat().st_mode) if path.exists() else None


def applied(directory: Path, name: str, old: Blob | None, new: Blob | None) -> Blob | None:
    path = directory / name
    write(path, old)
    patch = file_patch(os.fsencode(name), old, new)
    if patch:
        result = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            cwd=directory,
            input=patch.encode(),
            capture_output=True,
            check=False,
        )
        assert result.returncode == 0, (result.stderr.decode(), patch)
    return read(path)


def same(a: Blob | None, b: Blob | None) -> bool:
    return (a and (a.data, a.git_mode)) == (b and (b.data, b.git_mode))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"a\nb\nc\n", b"a\nB\nc\n"),
        (b"a", b"a\n"),
        (b"a\n", b"a"),
        (b"a\nb", b"a\nb\nc"),
        (b"x\n" * 50, b"y\n" + b"x\n" * 24 + b"z\n" + b"x\n" * 24),
        (b"", b"a\n"),
        (b"a\n", b""),
        (b"\n", b"\n\n"),
        (b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"a\x0cb\x1cc\nd\n", b"a\x0cb\x1cc\ne\n"),
        ("ä\u2028\n".encode(), "ö\u2028\n".encode()),
        (b"\0\1", b"\0\2"),
        (b"text\n", b"\xff\xfe"),
        (bytes(range(256)) * 50, b""),
    ],
)
def test_contents(tmp_path: Path, old: bytes, new: bytes) -> None:
    assert same(applied(tmp_path, "f", Blob(old, FILE), Blob(new, FILE)), Blob(new, FILE))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, Blob(b"a\n", FILE)),
        (None, Blob(b"", EXECUTABLE)),
        (None, Blob(b"\0", FILE)),
        (Blob(b"a\n", FILE), None),
        (Blob(b"\0", EXECUTABLE), None),
        (Blob(b"", FILE), None),
        (Blob(b"a\n", FILE), Blob(b"a\n", EXECUTABLE)),
        (Blob(b"a\n", FILE), Blob(b"b\n", EXECUTABLE)),
        (None, Blob(b"target", LINK)),
        (Blob(b"target", LINK), Blob(b"other", LINK)),
        (Blob(b"target", LINK), Blob(b"a\n", FILE)),
        (Blob(b"a\n", FILE), Blob(b"target", LINK)),
        (Blob(b"target", LINK), None),
    ],
)
def test_kinds(tmp_path: Path, old: Blob | None, new: Blob | None) -> None:
    assert same(applied(tmp_path, "d/f", old, new), new)


@pytest.mark.parametrize(
    "name", ["a b", "tab\there", "line\nbreak", 'quote"', "back\\slash", "ü", os.fsdecode(b"\xff")]
)
def test_names(tmp_path: Path, name: str) -> None:
    for old, new in (
        (None, Blob(b"x\n", FILE)),
        (Blob(b"x\n", FILE), Blob(b"\0", FILE)),
        (Blob(b"\0", FILE), None),
    ):
        assert same(applied(tmp_path, name, old, new), new)


def test_nothing_changed() -> None:
    assert file_patch(b"f", Blob(b"a", FILE), Blob(b"a", stat.S_IFREG | 0o600)) == ""


lines = st.lists(st.sampled_from([b"a", b"b", b"", b"c\r", "é".encode()]), max_size=25)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=lines, new=lines, ends=st.tuples(st.booleans(), st.booleans()))
def test_any_text(tmp_path: Path, old: list[bytes], new: list[bytes], ends: tuple[bool, bool]) -> None:
    before = Blob(b"\n".join(old) + b"\n" * ends[0], FILE)
    after = Blob(b"\n".join(new) + b"\n" * ends[1], FILE)
    assert same(applied(tmp_path, "f", before, after), after)


def test_a_small_edit_of_a_large_file_is_cheap() -> None:
    text = b"".join(b"line %d\n" % i for i in range(50_000))
    start = time.process_time()
    patch = file_patch(b"f", Blob(text, FILE), Blob(text.replace(b"line 25000\n", b"changed\n"), FILE))
    assert time.process_time() - start < 1
    assert len(patch) < 500


def test_a_rewritten_large_file_is_bounded(tmp_path: Path) -> None:
    old = b"".join(b"%d\n" % i for i in range(20_000))
    new = b"".join(b"%d\n" % (i * 7 % 20_011) for i in range(20_000))
    start = time.process_time()
    assert same(applied(tmp_path, "f", Blob(old, FILE), Blob(new, FILE)), Blob(new, FILE))
    assert time.process_time() - start < 5
