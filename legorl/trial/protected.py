"""Which of an agent's changes are rolled back before grading.

Invariant (I6): the tests that grade, and the files by which an interpreter or a test runner is configured
from outside the code, are those of the pristine repository, whatever the agent did to them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache

from legorl.sandbox.base import Snapshot
from legorl.tasks.task import Task

DEFAULT_PROTECTED = (
    "check.py",
    "tests/**",
    "test/**",
    "**/test_*.py",
    "**/*_test.py",
    "**/conftest.py",
    "**/pytest.ini",
    "**/sitecustomize.py",
    "**/usercustomize.py",
    "**/*.pth",
    "**/__pycache__/**",
    "**/*.pyc",
    ".git/**",
)
"""Patterns over paths relative to the repository; `*` stays within a path component, `**/` is any depth.
Byte code is on the list because an interpreter prefers it to the source it claims to come from."""

PROTECTED_KEY = "protected"
"""Key of the task's metadata with further patterns, separated by white space."""


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    def one(pattern: str) -> str:
        prefix = ""
        if pattern.startswith("**/"):
            prefix, pattern = r"(?:.*/)?", pattern[3:]
        suffix = ""
        if pattern.endswith("/**"):
            suffix, pattern = r"/.*", pattern[:-3]
        body = r"[^/]*".join(re.escape(part) for part in pattern.split("*"))
        return prefix + body + suffix

    return re.compile("|".join(f"(?:{one(pattern)})" for pattern in patterns))


def is_protected(path: str, task: Task) -> bool:
    """Whether a change of this path, relative to the repository, is rolled back."""
    patterns = DEFAULT_PROTECTED + tuple(task.metadata.get(PROTECTED_KEY, "").split())
    return _compiled(patterns).fullmatch(path) is not None


def roll_back(snapshot: Snapshot, task: Task) -> tuple[Snapshot, Sequence[str]]:
    """The snapshot without changes to protected paths, and the paths that were rolled back.

    `patch` is left as the agent made it: it is for the record, grading applies `changed`.
    """
    rolled = tuple(sorted(path for path in snapshot.changed if is_protected(path, task)))
    if not rolled:
        return snapshot, ()
    changed = {path: data for path, data in snapshot.changed.items() if path not in set(rolled)}
    modes = {path: mode for path, mode in snapshot.modes.items() if path in changed}
    return dataclasses.replace(snapshot, changed=changed, modes=modes), rolled
