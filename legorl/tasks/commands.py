"""`legorl tasks synth | index | list | show | validate | audit | build`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from legorl.errors import UserError
from legorl.tasks.audit import KINDS, Problem, audit_tasks
from legorl.tasks.build_commands import add_build, build_images, settings_and_names
from legorl.tasks.index import index
from legorl.tasks.pool import SPLITS, Pool, load_pool, pool_dir
from legorl.tasks.synth import GENERATORS, generator, synth
from legorl.tasks.task import Task, load_task
from legorl.tasks.validate import changed, validate_pool, validate_task

if TYPE_CHECKING:
    from rich.progress import Progress

DEFAULT_POOLS = Path(".cache/legorl/pools")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command; `run` executes what it parsed."""
    parser = subparsers.add_parser("tasks", help="make, list, show and validate task pools")
    commands = parser.add_subparsers(dest="tasks_command", required=True, metavar="COMMAND")

    make = commands.add_parser("synth", help="make a pool; does nothing when it is there")
    make.add_argument("name", help=f"generator: {', '.join(GENERATORS)}")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--train", type=int, help="number of train tasks")
    make.add_argument("--heldout", type=int, help="number of held-out tasks")

    add = commands.add_parser("index", help="make a pool of task directories that lie there already")
    add.add_argument("directory", type=Path, help="holds task directories, at most three levels below")
    add.add_argument("--heldout", type=_count, default=0, help="tasks to hold out, of those without a split")
    add.add_argument("--unchecked", action="store_true", help="do not run the tasks first")

    show_all = commands.add_parser("list", help="list pools, or the tasks of a pool")
    show_all.add_argument("pool", nargs="?", help="a pool's directory name, such as repair-0, or a path")
    show_all.add_argument("--split", choices=SPLITS)

    show = commands.add_parser("show", help="show a task as an agent gets it")
    show.add_argument("task", help="a task's id, or the path of its directory")
    show.add_argument("--solution", action="store_true", help="also show the reference fix")

    check = commands.add_parser(
        "validate", help="run a task, or every task of a pool, with and without its fix"
    )
    check.add_argument("target", metavar="POOL|TASK", help="name or path")

    audit = commands.add_parser("audit", help="find graders that pass an empty patch, fail the fix, or flake")
    audit.add_argument("targets", nargs="+", metavar="POOL|TASK", help="names or paths")
    audit.add_argument("--runs", type=_positive, default=3, help="runs of each kind (%(default)s)")
    audit.add_argument("--json", action="store_true", help="print one JSON object at the end")

    images = add_build(commands)

    for command in (make, show_all, show, check, audit, images):
        command.add_argument(
            "--pools", type=Path, default=DEFAULT_POOLS, help="where pools lie (%(default)s)"
        )
    for command in (make, add, check, audit, images):
        command.add_argument("--jobs", type=_positive, default=2, help="tasks run at once (%(default)s)")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


_count.__name__ = _positive.__name__ = "number"  # in argparse's messages


def run(args: argparse.Namespace) -> int:
    """Execute a parsed command; returns the exit status."""
    match args.tasks_command:
        case "synth":
            return _synth(args)
        case "index":
            return _index(args)
        case "list":
            if args.pool is None:
                return _list_pools(args.pools)
            return _list_tasks(_find_pool(args.pools, args.pool), args.split)
        case "show":
            return _show(_find_task(args.pools, args.task), args.solution)
        case "audit":
            return _audit(args)
        case "build":
            return _build(args)
        case _:
            return _validate(args)


def _synth(args: argparse.Namespace) -> int:
    kind = generator(args.name)
    train = kind.train if args.train is None else args.train
    heldout = kind.heldout if args.heldout is None else args.heldout
    out = pool_dir(args.pools, args.name, args.seed)
    with _Progress(f"tasks of {out.name}") as progress:
        pool = synth(args.name, args.seed, train, heldout, out, jobs=args.jobs, progress=progress)
    has = pool.manifest
    print(f"{pool.path}: {has.train} train, {has.heldout} held-out tasks, hash {has.hash[:12]}. {has.about}")
    return 0


def _index(args: argparse.Namespace) -> int:
    with _Progress("validated") as progress:
        pool = index(
            args.directory,
            heldout=args.heldout,
            validated=not args.unchecked,
            jobs=args.jobs,
            progress=progress,
        )
    has = pool.manifest
    print(f"{pool.path}: {has.train} train, {has.heldout} held-out tasks, hash {has.hash[:12]}.")
    print(f"train on them: tasks.pool={pool.path.resolve()}")
    return 0


def _pools(pools: Path) -> list[Path]:
    return sorted(path.parent for path in pools.glob("*/pool.json") if not path.parent.name.startswith("."))


def _list_pools(pools: Path) -> int:
    rows = []
    for path in _pools(pools):
        has = load_pool(path).manifest
        rows.append([path.name, str(has.train), str(has.heldout), has.generator, has.hash[:12], has.about])
    if not rows:
        print(f"There is no task pool in {pools} yet. `legorl tasks synth repair` makes one.")
        return 0
    _table(["pool", "train", "heldout", "generator", "hash", "about"], rows)
    return 0


def _list_tasks(pool: Pool, split: str | None) -> int:
    entries = [entry for entry in pool.entries if split in (None, entry.split)]
    _table(
        ["id", "split", "source", "module", "hash"],
        [[e.id, e.split, e.source, e.module, e.content_hash[:12]] for e in entries],
    )
    return 0


def _show(task: Task, solution: bool) -> int:
    facts = {"task": task.id, "split": task.split, "source": task.source, "module": task.module}
    facts |= {"path": str(task.path), "test command": task.test_command}
    facts["hidden tests"] = str(len(task.hidden_tests))
    files = sorted(path for path in task.workspace.rglob("*") if path.is_file())
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"\n--- instruction\n{task.instruction}\n\n--- repository")
    for path in files:
        print(f"{path.relative_to(task.workspace)} ({path.stat().st_size} bytes)")
    if solution:
        fixes = [file for name in ("fix.patch", "solve.sh") if (file := task.solution / name).is_file()]
        if not fixes:
            raise UserError(f"Task {task.id} has no reference fix: {task.solution} has no solve.sh.")
        print(f"\n--- reference fix\n{fixes[0].read_text(errors='replace')}", end="")
    return 0


def _validate(args: argparse.Namespace) -> int:
    pool = _pool_at(args.pools, args.target)
    if pool is None:
        task = _find_task(args.pools, args.target)
        screenings, total = iter([validate_task(task)]), 1
    else:
        screenings, total = validate_pool(pool, args.jobs), len(pool.entries)
    failures = []
    with _Progress("validated") as progress:
        for number, screening in enumerate(screenings, 1):
            if not screening.ok:
                failures.append(screening.reason)
            progress(number, total)
    for reason in failures:
        print(reason)
    print(f"{total - len(failures)} of {total} tasks hold: fail without the fix, pass with it, twice.")
    return 1 if failures else 0


def _audit(args: argparse.Namespace) -> int:
    tasks: list[Task] = []
    for target in args.targets:
        pool = _pool_at(args.pools, target)
        entries = () if pool is None else pool.entries
        tasks += [pool.task(entry.id) for entry in entries] if pool else [_find_task(args.pools, target)]
    problems: list[Problem] = []
    with _Progress("audited") as progress:
        for number, found in enumerate(audit_tasks(tasks, args.runs, args.jobs), 1):
            problems += found
            progress(number, len(tasks))
    if args.json:
        rows = [dataclasses.asdict(problem) for problem in problems]
        print(json.dumps({"tasks": len(tasks), "runs": args.runs, "problems": rows}, indent=1))
        return 1 if problems else 0
    for problem in problems:
        print(f"{problem.task}: {KINDS[problem.kind]}: {problem.detail}")
    wrong = {problem.task for problem in problems}
    print(f"{len(tasks) - len(wrong)} of {len(tasks)} graders grade, in {args.runs} runs of each kind.")
    return 1 if wrong else 0


def _build(args: argparse.Namespace) -> int:
    settings, names = settings_and_names(args.targets)
    tasks: list[Task] = []
    for name in names:
        pool = _pool_at(args.pools, name)
        tasks += pool.all_tasks() if pool else [_find_task(args.pools, name)]
    with _Progress("images") as progress:
        report = build_images(tasks, settings, args.jobs, progress)
    print(report)
    return 0


def _pool_at(pools: Path, name: str) -> Pool | None:
    for path in (pools / name, Path(name)):
        if (path / "pool.json").is_file():
            return load_pool(path)
    return None


def _find_pool(pools: Path, name: str) -> Pool:
    pool = _pool_at(pools, name)
    if pool is not None:
        return pool
    raise UserError(f"There is no pool {name!r} in {pools}.{_suggest(name, _names(pools))}")


def _find_task(pools: Path, name: str) -> Task:
    """By path, or by id in any pool; a task that differs from its index entry is refused."""
    if (Path(name) / "task.toml").is_file():
        return load_task(Path(name))
    ids: list[str] = []
    for path in _pools(pools):
        pool = load_pool(path)
        ids += [entry.id for entry in pool.entries]
        if name in ids:
            if wrong := [text for text in changed(pool) if text.startswith(f"{name}: ")]:
                raise UserError(f"{wrong[0]}. Remove the pool {path} and make it again.")
            return pool.task(name)
    raise UserError(f"There is no pool or task {name!r} in {pools}.{_suggest(name, ids + _names(pools))}")


def _names(pools: Path) -> list[str]:
    return [path.name for path in _pools(pools)]


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, cutoff=0.5)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return " `legorl tasks list` shows what there is." if known else " `legorl tasks synth repair` makes one."


def _table(head: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal; tab-separated lines without one."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in [head, *rows]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


class _Progress:
    """A bar on a terminal; a line for every tenth of the work without one."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.tenth = 0
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True), transient=True)

    def __enter__(self) -> _Progress:
        if self.bar is not None:
            self.bar.start()
            self.id = self.bar.add_task(self.label, total=None)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.update(self.id, completed=done, total=total)
        elif done * 10 // total > self.tenth:
            self.tenth = done * 10 // total
            print(f"{self.label}: {done} of {total}", file=sys.stderr, flush=True)
