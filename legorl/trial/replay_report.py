"""What a replay prints: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from legorl.trial.replay import Report

SHOWN = 5
"""Remarks of one kind that the table's notes show per file."""


def to_json(reports: Sequence[Report], errors: dict[str, str]) -> dict[str, Any]:
    """`{"ok", "files": [a report's fields, and ok], "errors": {file: message}}`."""
    files = [{**dataclasses.asdict(report), "ok": report.ok} for report in reports]
    return {"ok": not errors and all(report.ok for report in reports), "files": files, "errors": errors}


def table(reports: Sequence[Report]) -> Table:
    """One line per file."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("file")
    shown.add_column("harness")
    for name in ("turns", "recovered", "orphans", "re-tokenised", "open", "extend", "fork", "retry", "rows"):
        shown.add_column(name, justify="right")
    for name in ("threads", "verdict"):
        shown.add_column(name)
    for report in reports:
        numbers = [report.model_turns, report.recovered, len(report.orphans), report.retokenized_loss_tokens]
        numbers += [report.aligned[kind] for kind in ("open", "extend", "fork", "retry")]
        threads = ", ".join(f"{count} {kind}" for kind, count in report.threads.items())
        verdict = "[green]good[/]" if report.ok else "[red]faulty[/]"
        name = report.file.rpartition("/")[2]
        shown.add_row(escape(name), report.harness, *map(str, numbers), str(report.rows), threads, verdict)
    return shown


def notes(report: Report) -> Iterator[str]:
    """Lines about what is worth a look, in rich's markup."""
    name = escape(report.file.rpartition("/")[2])
    for title, remarks in (
        ("orphan", report.orphans),
        ("[red]lost[/]", report.lost),
        ("[red]speaker[/]", report.misattributed),
    ):
        for remark in remarks[:SHOWN]:
            yield f"{name}: {title}: request {remark.n}: {escape(remark.text)}"
        if len(remarks) > SHOWN:
            yield f"{name}: {title}: {len(remarks) - SHOWN} more"
    for violation in report.violations[:SHOWN]:
        yield f"{name}: [red]invariant[/]: {escape(violation)}"
    for what, count in report.skipped.items():
        yield f"{name}: {count} without a reply of the model: {escape(what)}"
