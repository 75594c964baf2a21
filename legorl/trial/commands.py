"""`legorl trial run TASK`, `show PATH`, `check PATH` and `replay FILE…`."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from legorl.errors import UserError
from legorl.proxy.invariants import check
from legorl.proxy.render import Renderer
from legorl.proxy.show import show, tokens
from legorl.proxy.store import load
from legorl.trial.record import PhaseRecord, TrialRecord, read_record

if TYPE_CHECKING:
    from legorl.config.schema import Config
    from legorl.policy.open_policy import Policy
    from legorl.tasks.task import Task

_REPLAY = """Send recorded traffic of a harness through the proxy's message layer and say what the ledger made
of it. A file holds one JSON object per line and request, plain or gzip: n, path, headers, body, kind,
scripted, status, and sse or response. Exit code 1 when a file cannot be read or is not good."""
_VOCABULARY = 4096


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `trial` with its commands."""
    text = "run one trial, or look into one"
    parser = subparsers.add_parser("trial", help=text, description=f"{text.capitalize()}.")
    actions = parser.add_subparsers(dest="action", required=True)
    _add_run(actions)
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


def _add_run(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    one = actions.add_parser(
        "run",
        help="run one trial and tell it as it happens",
        description="Run one trial and tell it as it happens. Exit code 3 when infrastructure ended it.",
    )
    one.add_argument("task", help="directory of a task, or its id in the configured pool (tasks.pool)")
    one.add_argument(
        "overrides", nargs="*", metavar="GROUP=CHOICE", help="such as harness=claude_code sandbox=docker"
    )
    one.add_argument("--expert", action="store_true", help="the scripted expert, on tasks of `repair`")
    one.add_argument("--model", type=Path, metavar="DIR", help="a model, in vLLM in this process")
    one.add_argument("--engine-url", metavar="URL", help="a vLLM server of the model in --model DIR")
    one.add_argument("--out", type=Path, metavar="DIR", help="where the record goes; by default below runs/")


def run(args: argparse.Namespace) -> int:
    """Prints; 0, 1 where `check` or `replay` find a fault, 3 where infrastructure ended `run`."""
    if args.action == "run":
        return asyncio.run(_run(args))
    console = Console(highlight=False, soft_wrap=True)
    match args.action:
        case "check":
            return _check(args.path, console)
        case "replay":
            return _replay(args, console)
    return _show(args.path, args.tokens, console)


async def _run(args: argparse.Namespace) -> int:
    from legorl.config.compose import compose
    from legorl.trial.one import open_workshop, run_one
    from legorl.trial.story import Story, conclusion
    from legorl.trial.termination import Blame, termination

    config = compose(args.overrides)
    out = _free(args.out, Path(config.paths.runs))
    task = _task(args.task, config)

    def say(text: str) -> None:
        print(text, flush=True)

    async with (
        _policy(args, config, task, out) as policy,
        open_workshop(config, policy.engine, policy.model_dir, policy.parser, out) as workshop,
    ):
        pool = workshop.runner.pool
        say(f"task {task.id} ({task.path}), harness {workshop.harness.name} {workshop.harness.version}")
        say(f"sandbox {pool.name} (limits by {pool.limits_by}), policy {pool.policy.name} {pool.policy.hash}")
        result = await run_one(workshop, task, watcher=Story(say))
    for line in conclusion(result.record, out):
        say(line)
    return 3 if termination(result.record.termination).blame is Blame.INFRASTRUCTURE else 0


def _free(out: Path | None, runs: Path) -> Path:
    """Where a trial's record goes: `out`, or a new directory below `runs`. No earlier record is replaced."""
    if out is None:
        return runs / f"{time.strftime('trial-%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if records := sorted(out.glob("trials/*/*/trial.json")):
        raise UserError(f"--out {out} has a trial's record already ({records[0]}). Name another directory.")
    return out


def _task(name: str, config: Config) -> Task:
    """By path, or by id in the configured pool."""
    from legorl.tasks.pool import load_pool, pool_dir
    from legorl.tasks.task import load_task

    if (Path(name) / "task.toml").is_file():
        return load_task(Path(name))
    if "/" in name:  # which no id has
        why = "it has no task.toml" if Path(name).exists() else "it does not exist"
        raise UserError(f"{name} is no task directory: {why}.")
    pool = Path(config.tasks.pool)
    if not pool.is_absolute():
        pool = pool_dir(Path(config.paths.pools), config.tasks.pool, config.tasks.seed)
    return load_pool(pool).task(name)


def _policy(
    args: argparse.Namespace, config: Config, task: Task, out: Path
) -> AbstractAsyncContextManager[Policy]:
    from legorl.policy import open_policy
    from legorl.trainer import environment

    # What vLLM reads when it is imported; here it starts its core itself.
    environment.set_up(replace(config, launcher=replace(config.launcher, warm_workers=False)))
    model = args.model or (Path(config.model.path) if config.model.path else None)
    if args.engine_url:
        if model is None:
            raise UserError("--engine-url needs --model DIR beside it: the tokenizer of the served model.")
        return open_policy.server(config, args.engine_url, model)
    if model is not None and not args.expert:
        return open_policy.model(config, model)
    if args.expert and args.model is None:
        return open_policy.expert(config, task, out / "tokenizer")
    raise UserError("Say who acts: --expert, --model DIR, or --engine-url URL --model DIR.")


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
    lines += [escape(f"{e.rule}: {e.kind}, turn {e.turn}: {e.text}") for e in record.evidence]
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
