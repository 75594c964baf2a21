"""The repository as it is graded: the task's tree with the history that led to it, and with nothing later.

Tests may ask git for a version or a file list, so the history that the agent's phase was without is back.
What was committed after the task's state (branches, remotes, stashes, reflogs, loose objects) is not: code
that the agent left runs here, and would read the fix where the agent could not.

Invariant: a graded copy is made once per state and appears in the cache complete or not at all; a repository
without a `.git` is used as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from legorl.errors import ImageError
from legorl.sandbox.aside import made_aside
from legorl.sandbox.seal import content_hash, git

BRANCH = "main"


def graded_workspace(workspace: Path, cache: Path) -> Path:
    """Directory to start a grading sandbox from; treat it as read-only.

    Args:
        workspace: the task's repository.
        cache: directory of the run area; a copy lies in `graded/` below it.

    Raises:
        ImageError: the tree or its history could not be read.
    """
    if not (workspace / ".git").exists():
        return workspace
    try:
        head = git(workspace, "rev-parse", "HEAD").strip()
        graded = cache / "graded" / f"{content_hash(workspace)}-{head[:12]}"
        if not graded.is_dir():
            _make(workspace, graded)
    except OSError as error:
        raise ImageError(f"{workspace} could not be prepared for grading: {error}.") from error
    return graded


def _make(workspace: Path, graded: Path) -> None:
    with made_aside(graded) as tree:
        shutil.copytree(workspace, tree, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        git(tree, "init", "-q", "--template=", "-b", BRANCH)
        git(tree, "config", "core.logAllRefUpdates", "false")
        # Fetched and not copied: only what the state descends from is sent, wherever its objects lie.
        tags = git(workspace, "tag", "--merged", "HEAD").split()
        wanted = [f"HEAD:refs/heads/{BRANCH}", *(f"refs/tags/{tag}:refs/tags/{tag}" for tag in tags)]
        git(tree, "fetch", "-q", "--no-tags", "--update-shallow", "-u", str(workspace.resolve()), *wanted)
        git(tree, "reset", "-q", "--mixed", "HEAD")
        for name in ("FETCH_HEAD", "ORIG_HEAD"):
            (tree / ".git" / name).unlink(missing_ok=True)
