"""Sealed workspaces."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from legorl.errors import ImageError
from legorl.sandbox import seal
from legorl.sandbox.seal import sealed_workspace


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    (root / "pkg").mkdir(parents=True)
    git(root, "init", "-q")
    (root / "pkg" / "mod.py").write_text("the fix\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "the future")
    (root / "pkg" / "mod.py").write_text("the defect\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o775)
    (root / "link").symlink_to("run.sh")
    (root / ".gitignore").write_text("*.log\n")
    (root / "a.log").write_text("kept\n")
    return root


def test_the_tree_without_its_history(tmp_path: Path, workspace: Path) -> None:
    sealed = sealed_workspace(workspace, tmp_path / "cache")
    assert (sealed / "pkg" / "mod.py").read_text() == "the defect\n"
    assert (sealed / "link").readlink() == Path("run.sh")
    assert (sealed / "run.sh").stat().st_mode & 0o777 == 0o755
    assert git(sealed, "log", "--all", "--format=%s") == "Initial state\n"
    assert git(sealed, "status", "--porcelain") == ""
    assert git(sealed, "ls-files").split() == [".gitignore", "a.log", "link", "pkg/mod.py", "run.sh"]
    assert not (sealed / ".git" / "logs").exists()
    content = b"".join(path.read_bytes() for path in (sealed / ".git").rglob("*") if path.is_file())
    assert b"the future" not in content


def test_the_same_tree_gives_the_same_commit(tmp_path: Path, workspace: Path) -> None:
    one = sealed_workspace(workspace, tmp_path / "one")
    workspace.rename(tmp_path / "elsewhere")
    two = sealed_workspace(tmp_path / "elsewhere", tmp_path / "two")
    assert one.name == two.name
    assert git(one, "rev-parse", "HEAD") == git(two, "rev-parse", "HEAD")


def test_made_once_and_again_after_a_change(tmp_path: Path, workspace: Path) -> None:
    first = sealed_workspace(workspace, tmp_path / "cache")
    stamp = (first / ".git" / "HEAD").stat().st_mtime_ns
    start = time.process_time()
    for _ in range(64):
        assert sealed_workspace(workspace, tmp_path / "cache") == first
    assert time.process_time() - start < 0.5
    seal._known.clear()
    assert sealed_workspace(workspace, tmp_path / "cache") == first
    assert (first / ".git" / "HEAD").stat().st_mtime_ns == stamp
    (workspace / "pkg" / "mod.py").write_text("another\n")
    second = sealed_workspace(workspace, tmp_path / "cache")
    assert second != first
    assert (second / "pkg" / "mod.py").read_text() == "another\n"


def test_mode_and_name_are_part_of_the_content(tmp_path: Path, workspace: Path) -> None:
    names = {sealed_workspace(workspace, tmp_path / "cache").name}
    (workspace / "run.sh").chmod(0o644)
    names.add(sealed_workspace(workspace, tmp_path / "cache").name)
    (workspace / "run.sh").rename(workspace / "walk.sh")
    names.add(sealed_workspace(workspace, tmp_path / "cache").name)
    assert len(names) == 3


def test_several_at_once_leave_one(tmp_path: Path, workspace: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(sealed_workspace(workspace, tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "cache" / "sealed").iterdir()] == [found[0].name]


def test_a_missing_workspace_and_a_missing_git(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImageError, match="nowhere"):
        sealed_workspace(tmp_path / "nowhere", tmp_path / "cache")
    monkeypatch.setitem(seal._GIT_ENV, "PATH", str(tmp_path))
    with pytest.raises(ImageError, match="apt-get install git"):
        sealed_workspace(workspace, tmp_path / "cache")
    assert list((tmp_path / "cache" / "sealed").iterdir()) == []
