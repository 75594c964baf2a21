"""Grading in the agent's own sandbox: for studies, with the rule `fresh_grading` off (`sandbox.verify=same`).

Invariant: the other rules hold as in a fresh sandbox: tests come in after the agent is gone, protected paths
are those of the pristine repository, byte code goes, earlier rewards go, the history is back. What the agent
left outside of the work tree stays, which is the point of the rule that is off.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from legorl.errors import IntegrityError
from legorl.sandbox.base import WORKDIR, Sandbox, Snapshot
from legorl.sandbox.policy import Policy
from legorl.tasks.task import Task
from legorl.trial.protected import roll_back
from legorl.trial.verify import (
    TESTS,
    Verification,
    judge,
    left_reward,
    put_files,
    remove_files,
    run_tests,
    with_left_reward,
)

_CLEAN_S = 20.0
_BYTE_CODE = (
    f"find {WORKDIR} -name __pycache__ -prune -exec rm -rf {{}} + -o -name '*.pyc' -exec rm -f {{}} +"
)
_EMPTY_TESTS = f"find {TESTS} -mindepth 1 -delete"

Files = Mapping[str, tuple[bytes, int]]


async def grade_in_place(
    task: Task,
    sandbox: Sandbox,
    snapshot: Snapshot,
    policy: Policy,
    *,
    workspace: Path,
    share: bool = False,
) -> Verification:
    """Grade; the sandbox is in the verify phase.

    Args:
        snapshot: of the sandbox in that phase.
        workspace: the pristine repository, with the history to grade with.
        share: see `parse_result`.

    Raises:
        IntegrityError: a rule could not be applied.
        InfrastructureError: the sandbox failed.
    """
    rolled_back: Sequence[str] = ()
    kept = snapshot
    if policy.holds("tests_restored"):
        kept, rolled_back = roll_back(snapshot, task)
        await _restore(sandbox, workspace, rolled_back, snapshot, kept)
        await _clean(sandbox, _BYTE_CODE)
    if policy.holds("history_sealed"):
        await _clean(sandbox, f"rm -rf {WORKDIR}/.git")
        await put_files(sandbox, dict(_tree(workspace / ".git", f"{WORKDIR}/.git")))
    if policy.holds("answers_absent"):
        await _clean(sandbox, _EMPTY_TESTS)
        await put_files(sandbox, dict(_tree(task.tests, TESTS)))
    left = await left_reward(sandbox, policy)
    result, files = await run_tests(sandbox, task, policy)
    after = await left_reward(sandbox, policy)
    verdict = judge(task, result, files, untouched=not kept.changed, share=share)
    verdict = with_left_reward(verdict, max((r for r in (left, after) if r is not None), default=None))
    return dataclasses.replace(verdict, rolled_back=tuple(rolled_back), skipped=snapshot.skipped)


async def _clean(sandbox: Sandbox, script: str) -> None:
    done = await sandbox.exec(["bash", "-c", script], timeout_s=_CLEAN_S, cwd="/")
    if done.code != 0:
        raise IntegrityError(f"`{script}` failed before grading: {done.stderr[-300:]!r}.")


async def _restore(
    sandbox: Sandbox, workspace: Path, paths: Iterable[str], snapshot: Snapshot, kept: Snapshot
) -> None:
    """Make protected paths what they are in the pristine repository, or as grading mended them."""
    await remove_files(sandbox, [path for path in paths if snapshot.changed[path] is not None])
    files: dict[str, tuple[bytes, int]] = {}
    for path in paths:
        data = kept.changed.get(path)
        if data is not None:
            files[f"{WORKDIR}/{path}"] = (data, kept.modes.get(path, 0o644))
        else:
            files |= _tree(workspace / path, f"{WORKDIR}/{path}")
    await put_files(sandbox, files)


def _tree(source: Path, target: str) -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Files and links at and below a path, by the place where they are put."""
    if not os.path.lexists(source):
        return
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        yield target, (os.fsencode(source.readlink()), mode)
    elif stat.S_ISDIR(mode):
        for entry in sorted(source.iterdir()):
            yield from _tree(entry, f"{target}/{entry.name}")
    else:
        yield target, (source.read_bytes(), stat.S_IMODE(mode))
