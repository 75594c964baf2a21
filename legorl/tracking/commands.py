"""`legorl status`, `legorl show` and `legorl audit`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from legorl.config.rundir import find_run, list_runs
from legorl.errors import UserError
from legorl.tracking.audit import audit, lines
from legorl.tracking.show import show
from legorl.tracking.status import RunHistory, RunStatus, run_status


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `status`, `show` and `audit`."""
    status = subparsers.add_parser("status", help="list runs", description="List runs, newest first.")
    status.add_argument("--json", action="store_true", help="a list of objects, for programs")
    page = subparsers.add_parser(
        "show", help="one run", description="Curves, endings and examples of one run."
    )
    check = subparsers.add_parser(
        "audit",
        help="who tried what",
        description="Count the trials of a run that tried what the integrity policy stops, with examples.",
    )
    check.add_argument("--json", action="store_true", help="an object, for programs")
    for parser in (page, check):
        parser.add_argument(
            "run", nargs="?", default="last", help="id, beginning of an id, directory, or `last` (default)"
        )
    for parser in (status, page, check):
        parser.add_argument(
            "--runs", type=Path, default=Path("runs"), help="directory of the runs (default: runs)"
        )


def run(args: argparse.Namespace) -> int:
    """Prints; 0."""
    if args.command == "show":
        print(show(RunHistory.read(find_run(args.runs, args.run))))
        return 0
    if args.command == "audit":
        history = RunHistory.read(find_run(args.runs, args.run))
        found = audit(history)
        print(
            json.dumps(found.to_json(), indent=1) if args.json else "\n".join(lines(found, str(history.path)))
        )
        return 0
    statuses = []
    for path in list_runs(args.runs):
        try:
            statuses.append(run_status(RunHistory.read(path)))
        except (UserError, OSError) as error:  # one broken directory must not hide the others
            print(f"legorl: {path} cannot be read: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps([dataclasses.asdict(status) for status in statuses], indent=1))
    elif statuses:
        print("\n".join([_HEAD, *map(_row, statuses)]))
    else:
        print(f"no runs in {args.runs}: `legorl train` makes one")
    return 0


_COLUMNS = "{:20} {:10} {:9} {:>7} {:>12} {:>12} {:>8} {:>5} {:>7}"
_HEAD = _COLUMNS.format("id", "name", "state", "step", "reward", "heldout", "pearson", "excl", "wall")


def _row(s: RunStatus) -> str:
    pearson = "-" if s.alignment.pearson_min is None else f"{s.alignment.pearson_min:.4f}"
    row = _COLUMNS.format(
        s.id,
        s.name,
        s.state,
        f"{s.step}/{s.steps}",
        _arrow(s.reward.first, s.reward.last),
        _arrow(s.heldout.first, s.heldout.last),
        pearson,
        s.excluded,
        f"{s.wall_s:.0f}s",
    )
    return f"{row}  {s.reason}" if s.reason else row


def _arrow(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{first:.2f} → {last:.2f}"
