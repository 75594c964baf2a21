"""Finds graders that do not grade: runs them on the untouched and on the fixed repository, and reads them.

Invariant: unlike a screening, which a pool's tasks have passed when they were made, an audit believes
nothing: any directory, any verifier, as many runs as are asked for, each from a fresh copy of the repository.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from legorl.tasks import isolate
from legorl.tasks.reward import stated_reward
from legorl.tasks.task import Task

_SCRIPT = """
set -u
listing() {{ find . -type f -not -path './.git/*' -exec sha256sum {{}} + | sort; }}
cd /workspace
for run in {runs}; do for state in {states}; do
  find /workspace /logs -mindepth 1 -delete
  cp -r {source}/. /workspace/
  out=/keep/$run-$state; mkdir $out
  if [ $state = fixed ]; then
    bash /solution/solve.sh >/dev/null 2>&1 </dev/null || {{ echo $? >$out/solve.code; continue; }}
  fi
  listing >$out/before.txt
  timeout {timeout} bash /tests/test.sh >/dev/null 2>&1 </dev/null
  listing >$out/after.txt
  for name in result.json reward.txt reward.json; do
    head -c 1000000 /logs/verifier/$name >$out/$name 2>/dev/null
  done
done; done
"""
_APPLIES = re.compile(
    r"git\s+apply|\bpatch\s+-p|solve\.sh|/solution\b|(?:fix|solution|gold|reference)[_.-]?patch",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one grader."""

    task: str
    kind: str
    """One of `KINDS`."""
    detail: str


KINDS = {
    "passes_empty": "gives the reward to the untouched repository",
    "fails_reference": "does not give the reward to the reference fix",
    "flaky": "changes its mind from run to run",
    "applies_reference": "applies the reference fix itself",
    "leaks_answer": "has the answer in the work tree that the agent gets",
    "no_reference": "has no reference fix to judge it by",
    "not_run": "could not be run",
}


@dataclass(frozen=True)
class _Run:
    """What one run of a verifier left."""

    passed: bool
    report: str
    """The part of it that must not change from run to run."""
    before: dict[str, str]
    after: dict[str, str]
    """Path -> SHA-256, without git's directory."""


def audit_task(task: Task, runs: int = 3) -> list[Problem]:
    """Audit one task.

    Raises:
        UserError: bwrap is missing.
    """
    found = [*_read(task), *_leaks(task)]
    has_fix = (task.solution / "solve.sh").is_file()
    if not has_fix:
        found.append(Problem(task.id, "no_reference", f"{task.solution / 'solve.sh'} is missing"))
    if not (task.path / "environment" / "repo").is_dir():
        return [
            *found,
            Problem(task.id, "not_run", "its repository is in an image; only its files were read"),
        ]
    states = ("empty", "fixed") if has_fix else ("empty",)
    kept = _run_all(task, runs, states)
    if isinstance(kept, str):
        return [*found, Problem(task.id, "not_run", kept)]
    seen = {state: [_seen(task, kept, f"{run}-{state}") for run in range(runs)] for state in states}
    solve_failed = [run for run in range(runs) if f"{run}-fixed/solve.code" in kept]
    return [*found, *_judge(task, seen, solve_failed)]


def _run_all(task: Task, runs: int, states: Sequence[str]) -> Mapping[str, bytes] | str:
    """Run everything in one sandbox; what was kept, or why it failed."""
    timeout = math.ceil(task.verify_timeout_s)
    script = _SCRIPT.format(
        runs=" ".join(map(str, range(runs))),
        states=" ".join(states),
        source=shlex.quote("/task/environment/repo"),
        timeout=timeout,
    )
    read_only = {"/task": task.path, "/tests": task.tests}
    if task.solution.is_dir():
        read_only["/solution"] = task.solution
    limit = len(states) * runs * (timeout + 15.0) + 30
    done = isolate.run(script, read_only=read_only, timeout_s=limit)
    if done.timed_out:
        return f"not finished after {limit:g} s"
    return f"exit status {done.code}: {done.output.strip()[-300:]}" if done.code else done.kept


def _seen(task: Task, kept: Mapping[str, bytes], run: str) -> _Run:
    def text(name: str) -> str:
        return kept.get(f"{run}/{name}", b"").decode(errors="replace")

    try:
        report = json.loads(text("result.json"))
        passed, failed = set(map(str, report["passed"])), sorted(map(str, report["failed"]))
    except (ValueError, LookupError, TypeError):
        passed, failed = set(), []
    reward = stated_reward(text("reward.txt").strip(), text("reward.json"))
    full = reward == 1.0 and set(task.hidden_tests) <= passed
    summary = json.dumps([reward, sorted(passed), failed])
    return _Run(full, summary, _listing(text("before.txt")), _listing(text("after.txt")))


def _listing(text: str) -> dict[str, str]:
    return {path: digest for digest, _, path in (line.partition("  ") for line in text.splitlines())}


def _judge(task: Task, seen: dict[str, list[_Run]], solve_failed: Sequence[int]) -> Iterator[Problem]:
    empty, fixed = seen["empty"], seen.get("fixed", [])
    runs = len(empty)
    if passes := sum(run.passed for run in empty):
        yield Problem(task.id, "passes_empty", f"with an empty patch in {passes} of {runs} runs")
    if solve_failed:
        yield Problem(task.id, "fails_reference", f"solve.sh failed in {len(solve_failed)} of {runs} runs")
    elif fixed and (fails := sum(not run.passed for run in fixed)):
        yield Problem(task.id, "fails_reference", f"in {fails} of {runs} runs: {fixed[0].report[:200]}")
    for state, results in (("an empty patch", empty), ("the reference", fixed)):
        if len({run.report for run in results}) > 1:
            different = len({run.report for run in results})
            yield Problem(task.id, "flaky", f"with {state}, {runs} runs gave {different} results")
    if fixed:
        mended = {p: d for p, d in fixed[0].before.items() if empty[0].before.get(p) != d}
        same = sorted(p for p, d in mended.items() if any(run.after.get(p) == d for run in empty))
        if same:
            yield Problem(
                task.id, "applies_reference", f"after test.sh {same[0]} is what the reference makes it"
            )


def _read(task: Task) -> Iterator[Problem]:
    """By its files: a verifier that names or applies a patch, or holds the reference's lines as one."""
    added = _added(task.solution)
    for file in sorted(path for path in task.tests.rglob("*") if path.is_file()):
        text = file.read_text(errors="replace")
        if file.suffix in (".sh", ".py", "") and (match := _APPLIES.search(text)):
            line = text[: match.start()].count("\n") + 1
            yield Problem(
                task.id,
                "applies_reference",
                f"tests/{file.relative_to(task.tests)}:{line} has `{match.group()}`",
            )
        elif added and file.suffix in (".patch", ".diff") and all(f"+{line}" in text for line in added):
            yield Problem(
                task.id, "applies_reference", f"tests/{file.relative_to(task.tests)} holds the reference fix"
            )


def _leaks(task: Task) -> Iterator[Problem]:
    """What sealing leaves in a work tree: a store of git's under another name, the reference itself."""
    added = _added(task.solution)
    for path in sorted(task.workspace.rglob("*")):
        name = path.relative_to(task.workspace)
        if ".git" in name.parts or path.is_symlink():
            continue
        if path.is_dir():
            if all((path / part).exists() for part in ("HEAD", "objects", "refs")):
                yield Problem(task.id, "leaks_answer", f"{name} is a git repository's store")
        elif path.suffix == ".bundle":
            yield Problem(task.id, "leaks_answer", f"{name} is a bundle of git's")
        elif path.suffix in (".patch", ".diff", ".rej"):
            text = path.read_text(errors="replace")
            if added and all(f"+{line}" in text for line in added):
                yield Problem(task.id, "leaks_answer", f"{name} holds the reference fix")


def _added(solution: Path) -> list[str]:
    patch = solution / "fix.patch"
    if not patch.is_file():
        return []
    lines = patch.read_text(errors="replace").splitlines()
    added = (line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))
    return [line for line in added if line.strip()]


def audit_tasks(tasks: Sequence[Task], runs: int, jobs: int) -> Iterator[list[Problem]]:
    """Audit tasks, `jobs` at a time; problems in the order of the tasks.

    Raises:
        UserError: bwrap is missing.
    """
    with ThreadPoolExecutor(jobs) as executor:
        try:
            yield from executor.map(lambda task: audit_task(task, runs), tasks)
        finally:
            executor.shutdown(cancel_futures=True)
