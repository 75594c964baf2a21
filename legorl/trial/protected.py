"""Which of an agent's changes are rolled back before grading.

Invariant (I6): the tests that grade, and the files by which an interpreter or a test runner is configured
from outside the code, are those of the pristine repository, whatever the agent did to them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Sequence
from functools import lru_cache
from pathlib import PurePosixPath

from legorl.sandbox.base import Snapshot
from legorl.tasks.task import Task
from legorl.trial.pytest_config import SHARED_FILES, with_pristine_tests

DEFAULT_PROTECTED = (
    "check.py",
    "tests/**",
    "test/**",
    "**/test_*.py",
    "**/*_test.py",
    "**/conftest.py",
    "**/pytest.ini",
    "**/.pytest.ini",
    "**/pytest.toml",
    "**/.pytest.toml",
    "**/tox.ini",
    "**/.coveragerc",
    "**/noxfile.py",
    "**/sitecustomize.py",
    "**/usercustomize.py",
    "**/*.pth",
    "**/__pycache__/**",
    "**/*.pyc",
    ".git/**",
)
"""Patterns over paths relative to the repository; `*` stays within a path component, `**/` is any depth.
Byte code is on the list because an interpreter prefers it to the source it claims to come from."""

SHADOWS = ("pytest", "_pytest", "unittest", "doctest", "pluggy", "tox", "nose", "coverage")
"""A new module of such a name at the top of the repository would be imported instead of the test runner's."""

PROTECTED_KEY = "protected"
"""Key of the task's metadata with further patterns, separated by white space."""


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    def one(pattern: str) -> str:
        prefix = ""
        if pattern.startswith("**/"):
            prefix, pattern = r"(?:.*/)?", pattern[3:]
        suffix = ""
        if pattern.endswith("/**"):  # the directory itself too: it may become a file or a link
            suffix, pattern = r"(?:/.*)?", pattern[:-3]
        body = r"[^/]*".join(re.escape(part) for part in pattern.split("*"))
        return prefix + body + suffix

    return re.compile("|".join(f"(?:{one(pattern)})" for pattern in patterns))


def is_protected(path: str, task: Task) -> bool:
    """Whether a change of this path, relative to the repository, is rolled back."""
    patterns = DEFAULT_PROTECTED + tuple(task.metadata.get(PROTECTED_KEY, "").split())
    return _compiled(patterns).fullmatch(path) is not None or _shadows(path, task)


def _shadows(path: str, task: Task) -> bool:
    top = path.split("/", 1)[0]
    return top.split(".", 1)[0] in SHADOWS and not os.path.lexists(task.workspace / top)


def roll_back(snapshot: Snapshot, task: Task) -> tuple[Snapshot, Sequence[str]]:
    """The snapshot without changes to protected paths, and the paths that were rolled back.

    `patch` is left as the agent made it: it is for the record, grading applies `changed`.
    """
    mended = _mended(snapshot, task)
    rolled = {path for path in snapshot.changed if is_protected(path, task)}
    rolled |= {path for path, data in mended.items() if data is None}
    # What stands in the place of a directory with protected files goes too, or they could not come back.
    rolled |= {str(parent) for path in rolled for parent in PurePosixPath(path).parents} & set(
        snapshot.changed
    )
    if not rolled and not mended:
        return snapshot, ()
    changed = {path: data for path, data in {**snapshot.changed, **mended}.items() if path not in rolled}
    modes = {path: mode for path, mode in snapshot.modes.items() if path in changed}
    return dataclasses.replace(snapshot, changed=changed, modes=modes), tuple(sorted({*rolled, *mended}))


def _mended(snapshot: Snapshot, task: Task) -> dict[str, bytes | None]:
    """Files that configure tests among other things -> what to grade with, None for the pristine file."""
    mended: dict[str, bytes | None] = {}
    for path, data in snapshot.changed.items():
        name = path.rsplit("/", 1)[-1]
        if name not in SHARED_FILES:
            continue
        pristine = task.workspace / path
        old = pristine.read_bytes() if pristine.is_file() and not pristine.is_symlink() else b""
        gone = data is None or stat.S_ISLNK(snapshot.modes.get(path, 0))
        own = b"" if data is None or gone else data
        new = with_pristine_tests(name, own, old)
        if new != own:
            mended[path] = None if gone else new
    return mended
