"""A harness's side of a conversation, straight to a ledger, with an oracle's copy of every engine call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from legorl.engine.base import Finish, ReplyParser, Sample
from legorl.engine.scripted import fake_routing
from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy import invariants
from legorl.proxy.echoes import Turn
from legorl.proxy.ledger import Ledger
from legorl.proxy.messages import ChatRequest, Message, Role, Tool, ToolUse
from legorl.proxy.render import Renderer
from tests.proxy.models import HermesLike

MAIN = Speaker(ThreadKind.MAIN)
BASH = Tool("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
ROUTING = (2, 2, 8)


def system(text: str) -> Message:
    return Message(Role.SYSTEM, text)


def user(text: str) -> Message:
    return Message(Role.USER, text)


def assistant(text: str, *calls: ToolUse) -> Message:
    return Message(Role.ASSISTANT, text, calls=calls)


def result(call: ToolUse, text: str) -> Message:
    return Message(Role.TOOL, text, call_id=call.id)


@dataclass
class Talk:
    """One trial's ledger, driven by hand."""

    renderer: Renderer
    tools: tuple[Tool, ...] = (BASH,)
    observed: bool = False
    end: str = "<|im_end|>"
    """The template's end of a turn."""
    parser: ReplyParser = field(default_factory=HermesLike)
    ledger: Ledger = field(init=False)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """By turn: what the engine was given."""
    samples: dict[str, list[int]] = field(default_factory=dict)
    """By turn: what the engine gave."""

    def __post_init__(self) -> None:
        self.ledger = Ledger("t", self.renderer, observed=self.observed)

    def ask(
        self,
        messages: Sequence[Message],
        reply: str = "Done.",
        *,
        speaker: Speaker = MAIN,
        delivered: bool = True,
        cut: bool = False,
        tools: tuple[Tool, ...] | None = None,
    ) -> Turn:
        """One request and its reply. `cut`: the engine stopped at the length limit."""
        request = ChatRequest(tuple(messages), self.tools if tools is None else tools)
        text = (reply or "x") if cut else reply + self.end
        parsed = self.parser.parse(self.renderer.decode(self.renderer.encode(text)))
        name = f"c{len(self.samples)}"
        calls = tuple(
            ToolUse(f"{name}-{index}", call.name, call.arguments) for index, call in enumerate(parsed.calls)
        )
        turn = self.play(request, speaker, text, Message(Role.ASSISTANT, parsed.text, calls=calls))
        turn.delivered = delivered
        return turn

    def play(self, request: ChatRequest, speaker: Speaker, text: str, message: Message) -> Turn:
        """One request, answered with the tokens of `text`, which the harness gets as `message`."""
        plan = self.ledger.begin(request, speaker)
        prompt = plan.prompt_ids.copy()
        ids = self.renderer.encode(text)
        routed_from = plan.segment.routed_rows
        sample = Sample(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            weight_version=np.zeros(len(ids), np.int32),
            finish=Finish.STOP if text.endswith(self.end) else Finish.LENGTH,
            routed_experts=fake_routing(np.concatenate([prompt, ids])[routed_from:-1], ROUTING),
            routed_start=routed_from,
        )
        name = f"c{len(self.samples)}"
        self.prompts[name], self.samples[name] = prompt.tolist(), ids.tolist()
        turn = self.ledger.commit(plan, name, sample, message)
        turn.delivered = True
        return turn

    def drop(self, messages: Sequence[Message], speaker: Speaker = MAIN) -> None:
        """A request whose client leaves before the reply."""
        request = ChatRequest(tuple(messages), self.tools)
        self.ledger.rollback(self.ledger.begin(request, speaker))

    def kinds(self) -> list[str]:
        """How each request was aligned."""
        return [turn.kind for turn in self.ledger.turns]

    def prompt_text(self, turn: Turn) -> str:
        """The prompt of a turn, special tokens kept."""
        return self.renderer.tokenizer.decode(self.prompts[turn.id], skip_special_tokens=False)

    def audit(self) -> None:
        """All invariants, against the oracle's copies too."""
        self.ledger.finish()
        assert invariants.check(self.ledger) == []
        rows = self.ledger.rows(tuple(self.ledger.threads))
        seen = {}
        for row in rows:
            assert row.routed_experts is not None
            assert row.routed_mask is not None
            assert row.routed_mask.all()
            assert np.array_equal(row.routed_experts, fake_routing(row.token_ids[:-1], ROUTING))
            for call in row.calls:
                assert call.id not in seen
                seen[call.id] = row
                assert row.token_ids[: call.start].tolist() == self.prompts[call.id]
                assert row.token_ids[call.start : call.end].tolist() == self.samples[call.id]
        orphans = {orphan.turn.id for orphan in self.ledger.orphans}
        assert not any(orphan.turn.echoed for orphan in self.ledger.orphans)
        assert seen.keys() | orphans == self.samples.keys()
        assert not seen.keys() & orphans
        trained = sum(len(ids) for name, ids in self.samples.items() if name in seen)
        assert sum(int(row.loss_mask.sum()) for row in rows) == trained
