"""A transcript as a reader wants it: threads, segments, turns with what was said, which tokens train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.text import Text
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.errors import UserError
from legorl.proxy.align import Node
from legorl.proxy.echoes import Turn
from legorl.proxy.messages import Message, Role
from legorl.proxy.segment import Segment
from legorl.proxy.transcript import Transcript

CUT = 400
"""Characters of a message that are shown."""
_STYLES = {Role.SYSTEM: "dim", Role.USER: "cyan", Role.TOOL: "yellow", Role.ASSISTANT: "green"}


def show(transcript: Transcript) -> Iterator[str]:
    """Lines in rich's markup."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(transcript.counts.items()))
    yield f"[bold]trial {escape(transcript.trial)}[/]: {len(transcript.turns)} replies ({counts or 'none'})"
    for name, values in sorted(transcript.wishes.items()):
        yield f"  the harness asked for {name}={', '.join(map(str, values))}; the run decides"
    for thread in transcript.threads.values():
        own = [segment for segment in transcript.segments if segment.thread == thread.name]
        trained = sum(int(segment.mask.view.sum()) for segment in own)
        parent = f", parent {thread.parent}" if thread.parent else ""
        yield f"[bold]thread {escape(thread.name)}[/]: {len(own)} segments, {trained} sampled tokens{parent}"
        for segment in own:
            yield from _segment(transcript, segment)
    for orphan in transcript.orphans:
        turn = orphan.turn
        yield f"[bold]orphan {escape(turn.id)}[/] of segment {turn.segment.id}: {turn.orphan}"
        yield from _message(turn.message)


def tokens(transcript: Transcript) -> Iterator[Text]:
    """Each segment's tokens: green where the engine sampled them, darker the less likely; grey as context."""
    tokenizer = _tokenizer(transcript.model_dir)
    for segment in transcript.segments:
        yield Text(f"segment {segment.id} ({segment.thread})", style="bold")
        line = Text()
        for id, sampled, logprob in zip(
            segment.tokens.view.tolist(), segment.mask.view, segment.logprobs.view, strict=True
        ):
            text = f"{id} " if tokenizer is None else tokenizer.decode([id], skip_special_tokens=False)
            line.append(text, style=_shade(float(logprob)) if sampled else "bright_black")
        yield line


def _segment(transcript: Transcript, segment: Segment) -> Iterator[str]:
    sampled = segment.mask.view
    origin = ""
    if segment.forked_from is not None:
        origin = f", begins with {segment.forked_from[1]} tokens of segment {segment.forked_from[0]}"
    yield f"  [bold]segment {segment.id}[/]: {len(segment)} tokens, {int(sampled.sum())} train{origin}"
    nodes = {node.turn.id: node for node in transcript.nodes if node.turn and _is_home(node, segment)}
    shown: set[int] = set()
    for turn in transcript.turns:
        if turn.segment is segment and not turn.orphan:
            yield from _turn(turn, nodes.get(turn.id), shown)


def _is_home(node: Node, segment: Segment) -> bool:
    return node.turn is not None and node.turn.segment is segment and node.segment is segment


def _turn(turn: Turn, node: Node | None, shown: set[int]) -> Iterator[str]:
    path: list[Node] = []
    at = node.parent if node else None
    while at is not None and at.id not in shown:
        path.append(at)
        at = at.parent
    for earlier in reversed(path):
        shown.add(earlier.id)
        if earlier.message is not None:
            yield from _message(earlier.message)
    if node is not None:
        shown.add(node.id)
    span = slice(turn.start, turn.end)
    logprobs, versions = turn.segment.logprobs.view[span], turn.segment.versions.view[span]
    notes = [turn.kind, turn.finish.value, f"mean log-prob {np.mean(logprobs):.3f}"]
    notes.append(f"weights {versions.min()}" + (f"-{versions.max()}" if np.ptp(versions) else ""))
    notes.append("echoed" if turn.echoed else "delivered" if turn.delivered else "not delivered")
    if turn.changed:
        notes.append(f"the harness shows other {', '.join(turn.changed)}")
    yield f"    [bold]{escape(turn.id)}[/] tokens {turn.start}-{turn.end}: {'; '.join(notes)}"
    yield from _message(turn.message)


def _message(message: Message) -> Iterator[str]:
    style = _STYLES[message.role]
    texts = [f"(thinks) {message.reasoning}"] if message.reasoning else []
    if message.text or not message.calls:
        texts.append(message.text)
    texts += [f"{call.name}({call.arguments})" for call in message.calls]
    for text in texts:
        cut = text if len(text) <= CUT else f"{text[:CUT]} … ({len(text) - CUT} more characters)"
        body = escape(cut).replace("\n", "\n" + " " * 17)
        yield f"      [{style}]{message.role.value:>9}[/]  {body}"


def _tokenizer(model_dir: str) -> Tokenizer | None:
    file = Path(model_dir) / "tokenizer.json"
    if not model_dir or not file.exists():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise UserError(f"{file} is not a tokenizer: {error}.") from error


def _shade(logprob: float) -> str:
    if logprob > -0.1:
        return "bold green"
    if logprob > -1.0:
        return "green"
    return "yellow" if logprob > -3.0 else "red"
