"""Makes a pool of task directories that lie somewhere already: it adds the index and touches no task.

Invariant: what is indexed was validated, unless the caller says otherwise; the description comes last, so a
directory with one has its index.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from legorl.errors import UserError
from legorl.tasks.draft import content_hash
from legorl.tasks.pool import (
    INDEX_FILE,
    POOL_FILE,
    SPLITS,
    Entry,
    Manifest,
    Pool,
    Screening,
    load_pool,
    pool_hash,
    write_index,
)
from legorl.tasks.task import Task, load_task
from legorl.tasks.validate import validate_tasks

GENERATOR = "index"
_UNCHECKED = Screening(False, False, False, False, runs=0)
_DEPTH = 3


def find(directory: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Task directories at or below a directory, sorted; none within another."""
    if (directory / "task.toml").is_file():
        yield directory
    elif depth:
        for entry in sorted(directory.iterdir()):
            if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                yield from find(entry, depth - 1)


def index(
    directory: Path,
    *,
    heldout: int = 0,
    validated: bool = True,
    jobs: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pool:
    """Index the tasks below a directory, which becomes a pool.

    Args:
        heldout: so many of the tasks that name no split of their own are held out, chosen by their ids.
        validated: run every task with and without its fix; a task that does not hold is an error.
        jobs: tasks run at once.
        progress: called with the tasks done and their total.

    Raises:
        UserError: no task, a broken one, one that does not hold, two of one id, or another's pool.
    """
    _refuse_another_pool(directory)
    paths = [path for path in find(directory) if path != directory] if directory.is_dir() else []
    if not paths:
        raise UserError(f"There is no task directory (one with a task.toml) below {directory}.")
    tasks = _split([load_task(path) for path in paths], heldout)
    _refuse_twins(tasks)
    screenings = list(_screen(tasks, jobs, progress)) if validated else [_UNCHECKED] * len(tasks)
    if wrong := [screening.reason for screening in screenings if validated and not screening.ok]:
        raise UserError(
            "\n".join([f"{len(wrong)} of {len(tasks)} tasks do not hold; nothing was indexed:", *wrong])
        )
    entries = [_entry(directory, task, seen) for task, seen in zip(tasks, screenings, strict=True)]
    counts = Counter(entry.split for entry in entries)
    about = "tasks made elsewhere" + ("" if validated else ", not validated")
    manifest = Manifest(
        name=directory.resolve().name,
        seed=0,
        about=about,
        generator=GENERATOR,
        train=counts["train"],
        heldout=counts["heldout"],
        hash=pool_hash(entries),
    )
    (directory / POOL_FILE).unlink(missing_ok=True)
    write_index(directory, manifest, entries)
    return load_pool(directory)


def _refuse_another_pool(directory: Path) -> None:
    """A pool that something else made has an index of its own, which says more."""
    if (directory / POOL_FILE).is_file() and (made := load_pool(directory).manifest.generator) != GENERATOR:
        raise UserError(
            f"{directory} is a pool already, made by {made}. Remove {INDEX_FILE} and {POOL_FILE}."
        )


def _refuse_twins(tasks: Sequence[Task]) -> None:
    known: dict[str, Task] = {}
    for task in tasks:
        if (twin := known.setdefault(task.id, task)) is not task:
            raise UserError(f"Two tasks have the id {task.id!r}: {twin.path} and {task.path}.")
        if task.split not in SPLITS:
            raise UserError(f"{task.path}: the split is {task.split!r}; it is one of {', '.join(SPLITS)}.")


def _split(tasks: list[Task], heldout: int) -> list[Task]:
    free = [task for task in tasks if not task.own_metadata]
    if heldout > len(free):
        raise UserError(f"{heldout} tasks cannot be held out: {len(free)} name no split of their own.")
    chosen = sorted(free, key=lambda task: hashlib.sha256(task.id.encode()).digest())[:heldout]
    ids = {task.id for task in chosen}
    return [dataclasses.replace(task, split="heldout") if task.id in ids else task for task in tasks]


def _screen(tasks: Sequence[Task], jobs: int, progress: Callable[[int, int], None]) -> Iterator[Screening]:
    for number, screening in enumerate(validate_tasks(tasks, jobs), 1):
        progress(number, len(tasks))
        yield screening


def _entry(directory: Path, task: Task, seen: Screening) -> Entry:
    found = dataclasses.asdict(seen)
    del found["reason"]
    return Entry(
        id=task.id,
        path=task.path.relative_to(directory).as_posix(),
        content_hash=content_hash(task.path),
        source=task.source,
        repository=directory.resolve().name,
        module=task.module,
        split=task.split,
        **found,
    )
