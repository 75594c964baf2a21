"""Directories of tasks that were made elsewhere become pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.tasks.index import index
from legorl.tasks.pool import load_pool
from legorl.tasks.validate import changed
from tests.tasks.test_task import TOML, write


def collection(root: Path, count: int = 6) -> Path:
    for number in range(count):
        toml = TOML.replace("Fix the age check!", f"task-{number}")
        write(root / ("deep/er" if number % 2 else ".") / f"t{number}", toml)
    return root


def test_tasks_of_harbor_become_a_pool(tmp_path: Path) -> None:
    pool = index(collection(tmp_path / "mine"), heldout=2, validated=False)
    assert (pool.manifest.train, pool.manifest.heldout, pool.manifest.name) == (4, 2, "mine")
    assert {task.split for task in pool.tasks("heldout")} == {"heldout"}
    ids = {task.id for split in ("train", "heldout") for task in pool.tasks(split)}
    assert ids == {f"task-{number}" for number in range(6)}
    held = pool.tasks("heldout")[0].id
    assert pool.task(held).split == "heldout" and changed(pool) == []
    again = index(tmp_path / "mine", heldout=2, validated=False)
    assert again.manifest == pool.manifest, "the same tasks are held out"
    moved = (tmp_path / "mine").rename(tmp_path / "moved")
    assert load_pool(moved).task(held).path.is_dir()


def test_what_cannot_be_indexed(tmp_path: Path, pools: Path) -> None:
    with pytest.raises(UserError, match="no task directory"):
        index(tmp_path / "nowhere")
    root = collection(tmp_path / "mine", 2)
    with pytest.raises(UserError, match="3 tasks cannot be held out: 2 name no split"):
        index(root, heldout=3)
    write(root / "twin", TOML.replace("Fix the age check!", "task-0"))
    with pytest.raises(UserError, match=r"Two tasks have the id 'task-0': .*t0 and .*twin"):
        index(root, validated=False)
    with pytest.raises(UserError, match="is a pool already, made by repair"):
        index(pools / "repair-0")
    assert not (root / "pool.json").exists()


def test_tasks_are_run_first(tmp_path: Path) -> None:
    root = collection(tmp_path / "mine", 1)
    with pytest.raises(UserError, match=r"solve.sh is missing"):
        index(root)
    assert not (root / "pool.json").exists()
