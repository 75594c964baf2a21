"""The repository as it is graded: what led to the task's state, and nothing that came after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.attack.repository import make_repository
from legorl.errors import ImageError
from legorl.sandbox.history import graded_workspace
from legorl.sandbox.seal import CANARY_BRANCH, canary_word, sealed_workspace
from tests.sandbox.test_seal import git


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has the word FUTURE in everything that came after its state."""
    path = tmp_path_factory.mktemp("task") / "repo"
    make_repository(path, "FUTURE")
    (path / "shop" / "cart.py").write_text("a defect of the task's own\n")  # never committed
    return path


def everything(directory: Path) -> str:
    """Contents of all objects, and of git's own files."""
    objects = git(directory, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    texts = [git(directory, "cat-file", "-p", name) for name in objects]
    files = [path.read_bytes() for path in (directory / ".git").rglob("*") if path.is_file()]
    return "".join(texts) + b"".join(files).decode(errors="replace")


def test_the_history_is_back_without_the_future(repository: Path, tmp_path: Path) -> None:
    assert "FUTURE" in everything(repository)
    graded = graded_workspace(repository, tmp_path)
    assert git(graded, "log", "--all", "--format=%s") == "Version 1.0\n"
    assert git(graded, "tag").split() == ["v1.0"]
    assert git(graded, "rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")
    assert (graded / "shop" / "cart.py").read_text() == "a defect of the task's own\n"
    assert git(graded, "status", "--porcelain") == " M shop/cart.py\n"
    assert "FUTURE" not in everything(graded)
    assert sorted(path.name for path in (graded / ".git").iterdir()) == sorted(
        ["HEAD", "config", "index", "objects", "refs"]
    )
    assert graded_workspace(repository, tmp_path) == graded
    assert [path.name for path in (tmp_path / "graded").iterdir()] == [graded.name]


def test_a_tree_without_history_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    assert graded_workspace(tmp_path / "repo", tmp_path) == tmp_path / "repo"
    (tmp_path / "repo" / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(ImageError, match="rev-parse"):
        graded_workspace(tmp_path / "repo", tmp_path)


def test_a_canary_is_a_branch_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    plain, baited = (sealed_workspace(repository, tmp_path, canary=canary) for canary in (False, True))
    assert plain != baited and canary_word(baited) not in everything(plain)
    assert (
        git(baited, "status", "--porcelain") == "" and git(baited, "log", "--format=%s") == "Initial state\n"
    )
    assert canary_word(baited) in git(baited, "show", CANARY_BRANCH)
    assert not (baited / ".git" / "ORIG_HEAD").exists() and "FUTURE" not in everything(baited)
    files = [{p.name for p in tree.iterdir()} for tree in (plain, baited)]
    assert files[0] == files[1]
    assert git(plain, "rev-parse", "HEAD") == git(baited, "rev-parse", "HEAD")
