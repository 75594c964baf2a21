"""What a replay prints: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from legorl.trial.replay import ALIGNMENTS, Report

_NUMBERS = ("turns", "recovered", "orphans", "re-tokenised", *ALIGNMENTS, "rows")
COLUMNS = ("file", "harness", *_NUMBERS, "threads", "verdict")
SHOWN = 5
"""Remarks of one kind that the table's notes show per file."""


def to_json(reports: Sequence[Report], errors: dict[str, str]) -> dict[str, Any]:
    """`{"ok", "files": [a report's fields, and ok], "errors": {file: message}}`."""
    files = [{**dataclasses.asdict(report), "ok": report.ok} for report in reports]
    return {"ok": not errors and all(report.ok for report in reports), "files": files, "errors": errors}


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Aligned lines: a head and one per file."""
    lines = [COLUMNS, *(_row(report) for report in reports)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    for line in lines:
        yield "  ".join(
            text.rjust(width) if title in _NUMBERS else text.ljust(width)
            for text, width, title in zip(line, widths, COLUMNS, strict=True)
        ).rstrip()


def _row(report: Report) -> tuple[str, ...]:
    numbers = [report.model_turns, report.recovered, len(report.orphans), report.retokenized_loss_tokens]
    numbers += [report.aligned[kind] for kind in ALIGNMENTS]
    threads = ", ".join(f"{count} {kind}" for kind, count in sorted(report.threads.items()))
    verdict = "good" if report.ok else "faulty"
    return (short_name(report.file), report.harness, *map(str, numbers), str(report.rows), threads, verdict)


def short_name(file: str) -> str:
    """A file's name without directory and endings."""
    return file.rpartition("/")[2].removesuffix(".gz").removesuffix(".jsonl")


def notes(report: Report) -> Iterator[str]:
    """Lines about what is worth a look, in rich's markup."""
    name = escape(short_name(report.file))
    for title, remarks in (
        ("orphan", report.orphans),
        ("[red]lost[/]", report.lost),
        ("[yellow]speaker[/]", report.misattributed),
    ):
        for remark in remarks[:SHOWN]:
            yield f"{name}: {title}: request {remark.n}: {escape(remark.text)}"
        if len(remarks) > SHOWN:
            yield f"{name}: {title}: {len(remarks) - SHOWN} more"
    for violation in report.violations[:SHOWN]:
        yield f"{name}: [red]invariant[/]: {escape(violation)}"
    for what, count in report.skipped.items():
        yield f"{name}: {count} without a reply of the model: {escape(what)}"
