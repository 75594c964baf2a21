"""`legorl trial show PATH` and `legorl trial check PATH`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from legorl.proxy.invariants import check
from legorl.proxy.show import show, tokens
from legorl.proxy.store import load
from legorl.trial.record import TrialRecord, read_record


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `trial` with its two commands."""
    parser = subparsers.add_parser("trial", help="look into one trial", description="Look into one trial.")
    actions = parser.add_subparsers(dest="action", required=True)
    page = actions.add_parser("show", help="threads, segments, turns, which tokens train")
    page.add_argument("--tokens", action="store_true", help="every token, coloured by what became of it")
    verify = actions.add_parser("check", help="check every invariant of what was recorded")
    for action in (page, verify):
        action.add_argument("path", type=Path, help="directory of the trial")


def run(args: argparse.Namespace) -> int:
    """Prints; 0, or 1 where `check` finds a violation."""
    console = Console(highlight=False, soft_wrap=True)
    return _check(args.path, console) if args.action == "check" else _show(args.path, args.tokens, console)


def _show(path: Path, with_tokens: bool, console: Console) -> int:
    if (path / "trial.json").exists():
        console.print(_head(read_record(path)))
    transcript = load(path)
    for line in show(transcript):
        console.print(line)
    if with_tokens:
        for text in tokens(transcript):
            console.print(text)
    return 0


def _head(record: TrialRecord) -> str:
    reward = "not graded" if record.reward is None else f"reward {record.reward:g}"
    parts = [f"task {record.task} ({record.split}, step {record.step})", record.harness, reward]
    ending = record.termination + (f": {record.detail}" if record.detail else "")
    lines = [escape(f"{'; '.join(parts)}; ended: {ending}{' (excluded)' if record.excluded else ''}")]
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record.phase_s.items())
    lines += [escape(phases)] if phases else []
    lines += [f"[red]{escape(violation)}[/]" for violation in record.violations]
    return "\n".join(lines)


def _check(path: Path, console: Console) -> int:
    transcript = load(path)
    violations = check(transcript)
    for violation in violations:
        console.print(f"[red]{escape(violation)}[/]")
    if not violations:
        rows = transcript.rows(tuple(transcript.threads))
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        console.print(
            f"I1 to I4 hold: {len(rows)} rows, {sum(len(row.calls) for row in rows)} replies, "
            f"{trained} trained tokens, {len(transcript.orphans)} orphans"
        )
    return 1 if violations else 0
