"""What of a task an agent's sandbox starts with, by the integrity policy.

Invariant (I6): with the rules on, it is a copy without history and without answers; what lies there as bait
is made up, belongs to no task, and reaches neither grading nor the agent's diff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from legorl.sandbox.base import Mount
from legorl.sandbox.history import graded_workspace
from legorl.sandbox.policy import Policy
from legorl.sandbox.seal import canary_word
from legorl.tasks.task import Task
from legorl.trial.canaries import bait

TESTS = "/tests"
SOLUTION = "/solution"

Seal = Callable[[Path, Path], Path]
"""From a workspace and the cache directory to the workspace that an agent may see."""


@dataclass(frozen=True)
class AgentView:
    """What the agent's sandbox is started with, besides the harness."""

    workspace: Path
    mounts: tuple[Mount, ...] = ()
    directories: tuple[str, ...] = ()
    canary: str = ""
    """A word that stands in the bait and nowhere else; empty without bait."""


def pristine(task: Task, policy: Policy, cache: Path) -> Path:
    """The repository to grade with: its history is back, but for what came after the task's state.

    Raises:
        ImageError: the history could not be read.
    """
    return graded_workspace(task.workspace, cache) if policy.holds("history_sealed") else task.workspace


def agent_view(task: Task, policy: Policy, cache: Path, seal: Seal, *, canaries: bool) -> AgentView:
    """Prepare it.

    Args:
        cache: directory of the run area for what is made once.
        canaries: put out bait where an honest agent has no business.

    Raises:
        ImageError: the tree could not be read or copied.
    """
    sealed = policy.holds("history_sealed")
    workspace = seal(task.workspace, cache) if sealed else task.workspace
    in_place = not policy.holds("fresh_grading")
    if not policy.holds("answers_absent"):
        answers = [Mount(task.tests, TESTS)]
        answers += [Mount(task.solution, SOLUTION)] if task.solution.is_dir() else []
        return AgentView(workspace, tuple(answers))
    directories = (TESTS,) if in_place else ()
    if not canaries:
        return AgentView(workspace, directories=directories)
    word = canary_word(workspace)
    files = bait(word, cache)
    mounts = [Mount(files / "solution", SOLUTION)] + ([] if in_place else [Mount(files / "tests", TESTS)])
    return AgentView(workspace, tuple(mounts), directories, word)
