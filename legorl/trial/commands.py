"""`legorl trial show PATH`, `legorl trial check PATH` and `legorl trial replay FILE…`."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from legorl.errors import UserError
from legorl.proxy.invariants import check
from legorl.proxy.render import Renderer
from legorl.proxy.show import show, tokens
from legorl.proxy.store import load
from legorl.trial.record import PhaseRecord, TrialRecord, read_record

_REPLAY = """Send recorded traffic of a harness through the proxy's message layer and say what the ledger made
of it. A file holds one JSON object per line and request, plain or gzip: n, path, headers, body, kind,
scripted, status, and sse or response. Exit code 1 when a file cannot be read or is not good."""
_VOCABULARY = 4096


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `trial` with its commands."""
    parser = subparsers.add_parser("trial", help="look into one trial", description="Look into one trial.")
    actions = parser.add_subparsers(dest="action", required=True)
    page = actions.add_parser("show", help="threads, segments, turns, which tokens train")
    page.add_argument("--tokens", action="store_true", help="every token, coloured by what became of it")
    verify = actions.add_parser("check", help="check every invariant of what was recorded")
    for action in (page, verify):
        action.add_argument("path", type=Path, help="directory of the trial; `legorl show` names some")
    again = actions.add_parser("replay", help="recorded traffic through the proxy", description=_REPLAY)
    again.add_argument("files", type=Path, nargs="+", metavar="FILE", help="recorded traffic")
    again.add_argument("--json", action="store_true", help="print JSON")
    again.add_argument("--harness", default="", metavar="NAME", help="who sent it; found out by default")
    again.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="tokenizer and chat template to use: a Hugging Face directory. By default the tiny policy's "
        "template and a byte-level BPE of 4,096 tokens, learned from this program's own source",
    )


def run(args: argparse.Namespace) -> int:
    """Prints; 0, or 1 where `check` finds a violation or `replay` a fault."""
    console = Console(highlight=False, soft_wrap=True)
    match args.action:
        case "check":
            return _check(args.path, console)
        case "replay":
            return _replay(args, console)
    return _show(args.path, args.tokens, console)


def _replay(args: argparse.Namespace, console: Console) -> int:
    from legorl.trial.replay import Report, replay
    from legorl.trial.replay_report import notes, table, to_json

    renderer = _default_renderer() if args.model is None else Renderer.load(args.model)
    reports: list[Report] = []
    errors: dict[str, str] = {}
    for file in args.files:
        try:
            reports.append(asyncio.run(replay(file, renderer, args.harness))[0])
        except UserError as error:
            errors[str(file)] = str(error)
    document = to_json(reports, errors)
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        for line in table(reports) if reports else ():
            console.print(escape(line))
        for line in (line for report in reports for line in notes(report)):
            console.print(line)
        for message in errors.values():
            console.print(f"[red]error[/]: {escape(message)}")
    return 0 if document["ok"] else 1


def _default_renderer() -> Renderer:
    """A tokenizer with real merges and a template for tools, made in about a second, without a model."""
    import legorl
    from legorl.policy.template import CHAT_TEMPLATE
    from legorl.policy.tokenizer import train_tokenizer

    sources = sorted(Path(legorl.__file__).parent.rglob("*.py"))
    tokenizer = train_tokenizer((source.read_text(encoding="utf-8") for source in sources), _VOCABULARY)
    return Renderer(tokenizer, CHAT_TEMPLATE, {}, None)


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
    lines += [escape(line) for line in map(phase_line, record.phases)]
    lines += [f"[red]{escape(violation)}[/]" for violation in record.violations]
    return "\n".join(lines)


def phase_line(phase: PhaseRecord) -> str:
    """One phase of a trial in words."""
    start = time.strftime("%H:%M:%S", time.localtime(phase.start))
    text = f"  {phase.name:7} {start}, {phase.end - phase.start:.2f} s"
    if phase.attempts > 1:
        text += f", {phase.attempts} attempts (before: {', '.join(phase.retried)})"
    return f"{text}: {phase.cause}" if phase.cause else text


def _check(path: Path, console: Console) -> int:
    transcript = load(path)
    violations = check(transcript)
    if (path / "trial.json").exists():
        record = read_record(path)
        violations += [f"found when it was recorded: {text}" for text in record.violations]
        if record.id != transcript.trial:
            violations.append(f"trial.json is of {record.id}, the transcript of {transcript.trial}")
    else:
        console.print("[yellow]no trial.json: a trial that was interrupted, or a transcript alone[/]")
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
