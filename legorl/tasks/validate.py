"""Screens tasks by running them: red without the reference fix, green with it, every time.

Invariant: a screening is the outcome of real runs of the task's own `test.sh`, `solve.sh` and visible test
command, each on a fresh copy of the repository.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from legorl.errors import UserError
from legorl.tasks import isolate
from legorl.tasks.draft import content_hash
from legorl.tasks.pool import Pool, Screening
from legorl.tasks.reward import stated_reward
from legorl.tasks.task import Task

# One sandbox for all runs of a task: starting one costs more than a repository's copy.
FILE_KB = 65536
"""Most output of the visible tests: it is kept in memory."""

SCRIPT = """
set -u
for run in {runs}; do for state in broken fixed; do
  find /workspace /logs -mindepth 1 -delete
  cp -r /task/{source}/. /workspace/
  if [ $state = fixed ]; then bash /solution/solve.sh || exit 90; fi
  out={keep}/$run-$state; mkdir $out
  (ulimit -f {file_kb}; exec timeout {timeout} bash -c {visible}) >$out/visible.txt 2>&1 </dev/null
  echo $? >$out/visible.code
  timeout {timeout} bash /tests/test.sh >/dev/null 2>&1 </dev/null
  for file in result.json reward.txt reward.json; do
    [ ! -e /logs/verifier/$file ] || cp /logs/verifier/$file $out/ || exit 91
  done
done; done
"""


def validate_task(task: Task, runs: int = 2) -> Screening:
    """Run a task with and without its reference fix, `runs` times each.

    Raises:
        UserError: bwrap is missing.
    """
    if not (task.solution / "solve.sh").is_file():
        raise UserError(f"{task.path} cannot be validated: {task.solution / 'solve.sh'} is missing.")
    timeout = math.ceil(task.verify_timeout_s)  # `timeout 0` would be none
    script = SCRIPT.format(
        runs=" ".join(map(str, range(runs))),
        timeout=timeout,
        visible=shlex.quote(task.test_command),
        file_kb=FILE_KB,
        keep=isolate.KEEP,
        source=task.workspace.relative_to(task.path),
    )
    done = isolate.run(
        script,
        read_only={"/task": task.path, "/tests": task.tests, "/solution": task.solution},
        timeout_s=4.0 * runs * timeout + 30,
    )
    if done.timed_out or done.code:
        end = "not finished in time" if done.timed_out else f"exit status {done.code}"
        tail = done.output.strip()[-300:]
        return Screening(False, False, False, False, runs, f"{task.id} could not be run ({end}): {tail}")
    try:
        seen = {s: [_Seen(task, done.kept, f"{r}-{s}") for r in range(runs)] for s in ("broken", "fixed")}
    except (ValueError, LookupError, TypeError) as error:
        file = "result.json" if task.hidden_tests else "reward"
        reason = f"{task.id}: its verifier left no readable {file}: {error!r}"
        return Screening(False, False, False, False, runs, reason)
    broken, fixed = seen["broken"], seen["fixed"]
    # Failures that differ from run to run say nothing about the fix.
    stable = len({tuple(sorted(s.failed)) for s in broken}) == 1
    screening = Screening(
        fails_without_fix=stable and not any(s.hidden_pass for s in broken),
        passes_with_fix=all(s.hidden_pass for s in fixed),
        # A task that names no visible tests has none that could be green too early.
        visible_red_without_fix=not task.test_command or not any(s.visible_green for s in broken),
        visible_green_with_fix=all(s.visible_green for s in fixed),
        runs=runs,
    )
    if screening.ok:
        return screening
    wrong = [f.name for f in dataclasses.fields(screening) if getattr(screening, f.name) is False]
    return dataclasses.replace(screening, reason=f"{task.id}: does not hold: {', '.join(wrong)}")


class _Seen:
    """One run, read from what it kept."""

    def __init__(self, task: Task, kept: Mapping[str, bytes], run: str) -> None:
        def text(name: str) -> str:
            return kept.get(f"{run}/{name}", b"").decode(errors="replace")

        reward = stated_reward(text("reward.txt"), text("reward.json"))
        if task.hidden_tests:
            result = json.loads(text("result.json"))
            self.failed = set(result["failed"])
            self.hidden_pass = set(task.hidden_tests) <= set(result["passed"])
            if self.hidden_pass != (reward == 1.0):
                raise UserError(
                    f"{task.path}: reward.txt and result.json of its verifier contradict each other."
                )
        elif reward is None:
            raise ValueError(f"no number from 0 to 1 in {text('reward.txt')[:40]!r}")
        else:  # its reward is all that it says
            self.failed, self.hidden_pass = {reward}, reward == 1.0
        exit_zero = text("visible.code") == "0\n"
        self.visible_green = exit_zero and re.search(task.pass_pattern, text("visible.txt")) is not None


def validate_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[Screening]:
    """Screen tasks, `jobs` at a time; results in the order of the tasks.

    Raises:
        UserError: bwrap is missing.
    """
    with ThreadPoolExecutor(jobs) as executor:
        try:
            yield from executor.map(validate_task, tasks)
        finally:
            executor.shutdown(cancel_futures=True)


def changed(pool: Pool) -> list[str]:
    """Tasks whose directory is not the one that was indexed: missing, or its hash differs."""
    wrong = []
    for entry in pool.entries:
        path = pool.path / entry.path
        if not path.is_dir():
            wrong.append(f"{entry.id}: its directory {path} is missing")
        elif (found := content_hash(path)) != entry.content_hash:
            wrong.append(
                f"{entry.id}: {path} was changed (hash {found[:12]}, indexed {entry.content_hash[:12]})"
            )
    return wrong


def validate_pool(pool: Pool, jobs: int = 2) -> Iterator[Screening]:
    """Screen every task of a pool anew; results in index order, as they come.

    Raises:
        UserError: a task directory was changed since the pool was made, or bwrap is missing.
    """
    if wrong := changed(pool):
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UserError(
            f"Pool {pool.path} was changed: {'; '.join(wrong[:3])}{more}. Remove it and make it again."
        )
    tasks = [pool.task(entry.id) for entry in pool.entries]
    yield from validate_tasks(tasks, jobs)
