"""What is rolled back before grading: tests, their configuration, and what stands in their place."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from legorl.sandbox.base import Snapshot
from legorl.sandbox.snapshot import contained
from legorl.trial.protected import is_protected, roll_back
from legorl.trial.pytest_config import with_pristine_tests
from tests.trial.tasks_for_tests import make_task

LINK = stat.S_IFLNK | 0o777


@pytest.mark.parametrize(
    "path",
    [
        *("tests", "tox.ini", "a/pytest.ini", ".pytest.ini", "pytest.toml", "noxfile.py", ".coveragerc"),
        *("unittest.py", "pytest/__init__.py", "_pytest/x.py", "unittest/case.py"),
    ],
)
def test_configuration_and_shadows(tmp_path: Path, path: str) -> None:
    assert is_protected(path, make_task(tmp_path))


def test_a_repository_of_a_test_runner_may_be_mended(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (task.workspace / "unittest").mkdir()
    assert not is_protected("unittest/case.py", task) and is_protected("pytest.py", task)
    assert not is_protected("src/pytest/x.py", task)


def test_what_stands_in_the_place_of_tests_goes(tmp_path: Path) -> None:
    left = Snapshot(
        {"tests": b"elsewhere", "tests/test_a.py": None, "pkg": b"x", "pkg/test_b.py": None, "a.py": b"1"},
        {"tests": LINK, "pkg": 0o644, "a.py": 0o644},
        "",
    )
    kept, rolled = roll_back(left, make_task(tmp_path))
    assert dict(kept.changed) == {"a.py": b"1"} and dict(kept.modes) == {"a.py": 0o644}
    assert tuple(rolled) == ("pkg", "pkg/test_b.py", "tests", "tests/test_a.py")


OLD_TOML = b'[project]\nname = "shop"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n\n[tool.ruff]\nx = 1\n'
OLD_CFG = b"[metadata]\nname = shop\n\n[tool:pytest]\naddopts = -q\n"


@pytest.mark.parametrize(
    ("name", "new", "old", "wanted"),
    [
        ("pyproject.toml", OLD_TOML.replace(b"shop", b"bank"), OLD_TOML, "new"),
        ("pyproject.toml", OLD_TOML.replace(b"-q", b"-p evil"), OLD_TOML, "mended"),
        ("pyproject.toml", OLD_TOML + b"[[tool.pytest.x]]\ny = 1\n", OLD_TOML, "mended"),
        ("pyproject.toml", b'[tool]\npytest.ini_options.addopts = "-p evil"\n', OLD_TOML, "old"),
        ("pyproject.toml", b'tool = {pytest = {ini_options = {addopts = "-p evil"}}}\n', OLD_TOML, "old"),
        ("pyproject.toml", b'[ tool . "pytest" . ini_options ]\naddopts = "-p evil"\n', OLD_TOML, "mended"),
        ("pyproject.toml", b"not [ toml", OLD_TOML, "old"),
        ("pyproject.toml", b"\xff", OLD_TOML, "old"),
        ("pyproject.toml", b'[tool.pytest.ini_options]\naddopts = "-p evil"\n', b"", "mended"),
        ("setup.cfg", OLD_CFG.replace(b"shop", b"bank"), OLD_CFG, "new"),
        ("setup.cfg", OLD_CFG.replace(b"-q", b"-p evil"), OLD_CFG, "mended"),
        ("setup.cfg", OLD_CFG + b"[tool:pytest]\naddopts = -p evil\n", OLD_CFG, "mended"),
        ("setup.cfg", b"[pytest]\naddopts = -p evil\n", b"[metadata]\n", "mended"),
        ("setup.cfg", b"no section\n", OLD_CFG, "old"),
    ],
)
def test_sections_of_test_runners(name: str, new: bytes, old: bytes, wanted: str) -> None:
    got = with_pristine_tests(name, new, old)
    assert (got == new) == (wanted == "new") and (got is None) == (wanted == "old")
    if got is not None:
        assert b"evil" not in got and with_pristine_tests(name, got, old) == got
        assert b"bank" in got or b"bank" not in new


def test_such_a_file_is_graded_with_the_tasks_own_sections(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    (task.workspace / "pyproject.toml").write_bytes(OLD_TOML)
    evil = OLD_TOML.replace(b"-q", b"-p evil").replace(b"shop", b"bank")
    kept, rolled = roll_back(Snapshot({"pyproject.toml": evil}, {"pyproject.toml": 0o644}, ""), task)
    assert tuple(rolled) == ("pyproject.toml",)
    graded = kept.changed["pyproject.toml"]
    assert graded is not None and b"bank" in graded and b"evil" not in graded
    for left in (
        Snapshot({"pyproject.toml": None}, {}, ""),
        Snapshot({"pyproject.toml": b"/x"}, {"pyproject.toml": LINK}, ""),
    ):
        kept, rolled = roll_back(left, task)
        assert not kept.changed and tuple(rolled) == ("pyproject.toml",)
    harmless = Snapshot({"setup.cfg": b"[metadata]\n"}, {"setup.cfg": 0o644}, "")
    assert roll_back(harmless, task) == (harmless, ())


def test_paths_that_climb_out_are_left_out() -> None:
    wrong = ("../x", "/etc/passwd", "a/../../x", "a//b", ".git/hooks/pre-commit", "sub/.git/config", "./a")
    left = Snapshot(
        dict.fromkeys([*wrong, "a.py"], b"x"), dict.fromkeys([*wrong, "a.py"], 0o644), "", ("big",)
    )
    kept = contained(left)
    assert set(kept.changed) == set(kept.modes) == {"a.py"} and kept.skipped == tuple(sorted([*wrong, "big"]))
    assert contained(kept) is kept
