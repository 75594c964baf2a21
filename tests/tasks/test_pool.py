"""Pools: order, lookup, what is wrong with a directory is said."""

import dataclasses
from pathlib import Path

import pytest

from legorl.errors import UserError
from legorl.tasks.pool import load_pool, write_index
from legorl.tasks.synth import synth
from legorl.tasks.validate import changed, validate_pool


def test_tasks_come_in_index_order(pools: Path) -> None:
    pool = load_pool(pools / "repair-0")
    assert [task.id for task in pool.tasks("train")] == [f"repair-0-train-{n:04}" for n in range(5)]
    assert [task.id for task in pool.tasks("heldout")] == [f"repair-0-heldout-{n:04}" for n in range(2)]
    assert pool.task("repair-0-train-0003") == pool.tasks("train")[3]
    assert all(task.split == "train" for task in pool.tasks("train"))


def test_the_index_is_what_a_moved_pool_needs(pools: Path, tmp_path: Path) -> None:
    moved = (pools / "repair-0").rename(tmp_path / "elsewhere")
    assert load_pool(moved).tasks("heldout")[0].path.is_dir()
    assert changed(load_pool(moved)) == []


def test_missing_pool_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="legorl tasks synth repair"):
        load_pool(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"name": "repair"}', '{"a": 1}'])
def test_unreadable_description(pools: Path, text: str) -> None:
    (pools / "repair-0" / "pool.json").write_text(text)
    with pytest.raises(UserError, match="not a pool description"):
        load_pool(pools / "repair-0")


def test_unreadable_index(pools: Path) -> None:
    index = pools / "repair-0" / "index.parquet"
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        load_pool(pools / "repair-0")
    index.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_pool(pools / "repair-0")


def test_unknown_names_are_answered_with_near_ones(pools: Path) -> None:
    pool = load_pool(pools / "repair-0")
    with pytest.raises(UserError, match="repair-0-train-0001"):
        pool.task("repair-0-train-001")
    with pytest.raises(UserError, match="train and heldout"):
        pool.tasks("test")


def test_changed_and_missing_tasks_are_found_and_refused(pools: Path) -> None:
    pool = load_pool(pools / "repair-0")
    file = pool.task("repair-0-train-0001").tests / "test_hidden.py"
    file.write_text(file.read_text().replace("True", "False") + "\n")
    (pool.path / "tasks" / "repair-0-heldout-0000").rename(pool.path / "gone")
    wrong = changed(pool)
    assert [text.partition(":")[0] for text in wrong] == ["repair-0-train-0001", "repair-0-heldout-0000"]
    with pytest.raises(UserError, match="repair-0-train-0001"):
        next(validate_pool(pool))


def test_synth_returns_the_pool_that_is_there_untouched(pools: Path) -> None:
    path = pools / "repair-0"
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert synth("repair", 0, 5, 2, path).manifest.train == 5
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


@pytest.mark.parametrize(("seed", "train", "heldout"), [(1, 5, 2), (0, 6, 2), (0, 5, 3)])
def test_synth_never_changes_another_pool(pools: Path, seed: int, train: int, heldout: int) -> None:
    with pytest.raises(UserError, match="holds another pool"):
        synth("repair", seed, train, heldout, pools / "repair-0")


def test_synth_refuses_nonsense(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'repair'"):
        synth("repiar", 0, 5, 2, tmp_path / "x")
    with pytest.raises(UserError, match="heldout=0"):
        synth("repair", 0, 5, 0, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_path_that_climbs_out_is_refused(pools: Path) -> None:
    path = pools / "repair-0"
    pool = load_pool(path)
    for wrong in ("../elsewhere", "/etc", "tasks/../../x"):
        entries = [dataclasses.replace(pool.entries[0], path=wrong), *pool.entries[1:]]
        write_index(path, pool.manifest, entries)
        with pytest.raises(UserError, match="outside of the pool"):
            load_pool(path)
