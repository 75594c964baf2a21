"""Recorded traffic sent through the proxy once more: what would the ledger have made of it?

Each request goes through its wire, the harness's speaker rule, alignment and the ledger of one trial, in the
order of arrival. The engine says what the model was made to say then, in token ids of the given tokenizer,
and the recorded tool-call ids are issued. Invariant: the verdict does not rest on the ledger's word: an
auditor keeps its own copy of every prompt and sample and compares the training rows with it, id by id.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from legorl.engine.base import Finish, Parsed, Sample, Sampling, ToolCall
from legorl.engine.scripted import fake_routing
from legorl.errors import UserError
from legorl.harness.base import Speaker, ThreadKind
from legorl.harness.speakers import RULES, detect, generic
from legorl.proxy.invariants import check
from legorl.proxy.ledger import Ledger
from legorl.proxy.proxy import Proxy
from legorl.proxy.refusal import Refusal
from legorl.proxy.render import Renderer
from legorl.proxy.session import Session
from legorl.proxy.wire import WireFormat
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat
from legorl.proxy.wire_openai_responses import OpenAIResponses
from legorl.trial.recording import Block, Record, read_records

WIRES: dict[str, WireFormat] = {
    "messages": Anthropic(),
    "completions": OpenAIChat(),
    "responses": OpenAIResponses(),
}
"""By the last part of a request's path."""
ALIGNMENTS = ("open", "extend", "fork", "retry")
_ROUTING = (2, 2, 8)
"""Layers, experts per token, experts of the routing rows that the engine makes up."""
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True)
class Remark:
    """Something about one recorded request."""

    n: int
    text: str


@dataclass
class Report:
    """What became of one file. `to_json` has the fields under these names."""

    file: str
    harness: str
    requests: int = 0
    """Recorded requests of any kind."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Requests that ask for no reply, or got none: by path or by status."""
    model_turns: int = 0
    """Replies of the model that were recorded."""
    recovered: int = 0
    """Of these, those whose tokens are in the loss exactly once, as they were sampled."""
    orphans: list[Remark] = field(default_factory=list)
    """Replies that are in no loss, and why."""
    lost: list[Remark] = field(default_factory=list)
    """Replies that are neither recovered nor orphans, and why. Always a fault."""
    loss_tokens: int = 0
    retokenized_loss_tokens: int = 0
    """Loss tokens that the engine did not sample at that place. Always a fault."""
    aligned: dict[str, int] = field(default_factory=dict)
    """Replies by alignment of their request: open, extend, fork, retry."""
    threads: dict[str, int] = field(default_factory=dict)
    """Threads by kind: main, subagent, side."""
    turns_by_thread: dict[str, int] = field(default_factory=dict)
    """Replies by thread."""
    rows: int = 0
    misattributed: list[Remark] = field(default_factory=list)
    """Requests whose recorded speaker is another kind than the rule says: the rule or the recording errs."""
    violations: list[str] = field(default_factory=list)
    """Invariants of the ledger that do not hold. Always a fault."""

    @property
    def ok(self) -> bool:
        """Nothing that is always a fault."""
        return not (self.lost or self.retokenized_loss_tokens or self.violations)


async def replay(path: Path, renderer: Renderer, harness: str = "") -> tuple[Report, Ledger]:
    """Replay one file.

    Args:
        renderer: tokenizer and chat template of the model that is thought to have spoken.
        harness: whose speaker rule to use; found out from the requests when empty.

    Raises:
        UserError: the file is no recording, holds no request for a reply, or there is no such harness.
    """
    records = read_records(path)
    name = harness or _harness_of(records)
    if name and name not in RULES:
        raise UserError(f"There is no harness {name!r}. Known: {', '.join(sorted(RULES))}.")
    if not any(_wire(record) for record in records):
        paths = ", ".join(sorted({record.path for record in records})[:3])
        raise UserError(f"{path} holds no request on a wire of this proxy, only {paths}.")
    report = Report(str(path), name or "unknown", requests=len(records))
    player = _Player(renderer)
    proxy = Proxy(player, renderer, player, context_tokens=_UNLIMITED)
    session = proxy.open(
        path.name,
        speaker=RULES.get(name, generic),
        sampling=Sampling(max_tokens=_UNLIMITED),
        turn_limit=_UNLIMITED,
        trial_tokens=_UNLIMITED,
        new_call_id=player.next_call_id,
    )
    turns: dict[str, Record] = {}
    for record in records:
        wire = _wire(record)
        if wire is None:
            _count(report.skipped, record.path)
        elif record.status != 200:
            _count(report.skipped, f"status {record.status}")
        else:
            await _send(record, wire, session, player, report, turns)
    ledger = await proxy.close(path.name)
    _judge(report, ledger, player, turns)
    return report, ledger


def _harness_of(records: Sequence[Record]) -> str:
    names = (detect(record.headers, record.body) for record in records if isinstance(record.body, dict))
    return next((name for name in names if name), "")


def _wire(record: Record) -> WireFormat | None:
    return WIRES.get(record.path.rstrip("/").rpartition("/")[2])


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


async def _send(
    record: Record,
    wire: WireFormat,
    session: Session,
    player: _Player,
    report: Report,
    turns: dict[str, Record],
) -> None:
    report.model_turns += 1
    if record.blocks is None:
        report.lost.append(Remark(record.n, "nothing is scripted for it"))
        return
    try:
        body = session.bodies.read(record.raw_body)
        request = wire.parse(body)
        speaker = session.speaker(record.headers, body)
        player.load(record)
        turn, reply = await session.complete(request, speaker, call_id_prefix="")
    except Refusal as refusal:
        why = refusal.message if session.failure is None else f"{refusal.message}: {session.failure}"
        report.lost.append(Remark(record.n, f"refused: {why}"))
        return
    turn.delivered = record.complete
    turns[reply.id] = record
    said = _kind(speaker)
    if record.kind and record.kind != said:
        report.misattributed.append(Remark(record.n, f"recorded {record.kind}, taken for {said}"))


def _kind(speaker: Speaker) -> str:
    """In the words of the recordings."""
    if speaker.kind is ThreadKind.SIDE:
        return "compaction" if speaker.label == "compaction" else "side"
    return "sub" if speaker.kind is ThreadKind.SUBAGENT else "main"


def _judge(report: Report, ledger: Ledger, player: _Player, turns: dict[str, Record]) -> None:
    rows = ledger.rows(tuple(ledger.threads))
    found: Counter[str] = Counter()
    for row in rows:
        sampled = np.zeros(len(row.token_ids), np.bool_)
        for call in row.calls:
            prompt, sample = player.heard[call.id], player.said[call.id]
            start, end = call.start, call.start + len(sample)
            if np.array_equal(row.token_ids[:start], prompt) and end == call.end:
                sampled[start:end] = row.token_ids[start:end] == sample
                found[call.id] += bool(sampled[start:end].all())
        report.retokenized_loss_tokens += int((row.loss_mask & ~sampled).sum())
        report.loss_tokens += int(row.loss_mask.sum())
    for turn in ledger.turns:
        n = turns[turn.id].n
        if turn.orphan:
            report.orphans.append(Remark(n, turn.orphan))
        elif found[turn.id] == 1:
            report.recovered += 1
        else:
            report.lost.append(Remark(n, f"in {found[turn.id]} rows"))
        _count(report.turns_by_thread, turn.segment.thread)
    report.aligned = {kind: ledger.counts[kind] for kind in ALIGNMENTS}
    for thread in ledger.threads.values():
        _count(report.threads, thread.kind.value)
    report.rows = len(rows)
    report.violations = check(ledger)


class _Player:
    """Engine and parser that play one record after the other, and the auditor's copy of what passed."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._record: Record | None = None
        self._call_ids: deque[str] = deque()
        self.heard: dict[str, NDArray[np.int32]] = {}
        """By request: the prompt. int32 [P]."""
        self.said: dict[str, NDArray[np.int32]] = {}
        """By request: the sample. int32 [n]."""

    def load(self, record: Record) -> None:
        """What is said next."""
        calls = [block for block in record.blocks or () if block.kind == "call"]
        missing = [f"call_replay_{record.n}_{index}" for index in range(len(record.call_ids), len(calls))]
        self._record = record
        self._call_ids = deque([*record.call_ids, *missing])

    def next_call_id(self) -> str:
        """The recorded id of the reply's next call."""
        return self._call_ids.popleft()

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        """See `TokenEngine.generate`."""
        assert self._record is not None, "a record is loaded before its request is sent"
        prompt = np.array(prompt_ids, dtype=np.int32)
        text = "".join(_written(block) for block in self._record.blocks or ())
        ids = self._renderer.encode(text)
        cut = self._record.cut_by_length and len(ids) > 0
        if not cut:
            ids = np.append(ids, np.int32(self._renderer.end_id))
        self.heard[request_id], self.said[request_id] = prompt, ids.copy()
        return Sample(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            weight_version=np.zeros(len(ids), np.int32),
            finish=Finish.LENGTH if cut else Finish.STOP,
            routed_experts=fake_routing(np.concatenate([prompt, ids])[routed_from:-1], _ROUTING),
            routed_start=routed_from,
        )

    async def abort(self, request_id: str) -> None:
        """See `TokenEngine.abort`. Nothing runs between two records."""

    async def close(self) -> None:
        """See `TokenEngine.close`."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser.parse`. The harness got the blocks, well-formed or not, so they are the reply."""
        assert self._record is not None, "a record is loaded before its request is sent"
        blocks = self._record.blocks or ()
        calls = tuple(ToolCall(block.name, block.text) for block in blocks if block.kind == "call")
        return Parsed(_joined(blocks, "text"), calls, _joined(blocks, "thinking"))


def _joined(blocks: Sequence[Block], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _written(block: Block) -> str:
    """A block as a policy might write it; a call's arguments as raw as they are."""
    if block.kind == "call":
        return f'<tool_call>\n{{"name": "{block.name}", "arguments": {block.text}}}\n</tool_call>'
    return f"<think>{block.text}</think>" if block.kind == "thinking" else block.text
