"""Recorded traffic of real harnesses through wire, alignment and ledger."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legorl.harness.base import Speaker, ThreadKind
from legorl.proxy.messages import Message, Role, ToolUse
from legorl.proxy.render import Renderer
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat
from tests.proxy.models import call_text
from tests.proxy.talk import Talk

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
EXPECTED = {
    "claude-basic": {"open": 1, "extend": 4},
    "opencode-basic": {"open": 2, "extend": 4},
    "mini-basic": {"open": 1, "extend": 4},
    "mini-awkward": None,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_turn_is_recovered_once(renderer: Renderer, name: str) -> None:
    talk = Talk(renderer)
    with gzip.open(CAPTURES / f"{name}.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    for record in records:
        if record["status"] == 200:
            play(talk, record)
    assert len(talk.ledger.turns) == sum(record["status"] == 200 for record in records)
    talk.audit()
    assert not talk.ledger.orphans
    if EXPECTED[name] is not None:
        assert talk.ledger.counts == EXPECTED[name]
        assert len(talk.ledger.rows()) == 1
    else:  # replies that the harness drops as malformed: each ends a segment
        dropped = len(talk.ledger.rows()) - 1
        assert dropped == talk.ledger.counts["fork"]
        assert 1 <= dropped < len(talk.ledger.turns)


def play(talk: Talk, record: dict[str, Any]) -> None:
    """Send a recorded request and answer it as recorded."""
    wire = Anthropic() if "/messages" in record["path"] else OpenAIChat()
    request = wire.parse(record["body"])
    kind = ThreadKind(record["kind"])
    speaker = Speaker(kind, key="main" if kind is ThreadKind.MAIN else "title")
    ids = issued_ids(record)
    texts, calls, reasoning, raw = [], [], "", ""
    for block in record["scripted"]:
        if block[0] == "tool":
            calls.append(ToolUse(ids[len(calls)], block[1], block[2]))
            raw += call_text(block[1], block[2])
        elif block[0] == "text":
            texts.append(block[1])
            raw += block[1]
        else:
            reasoning += block[1]
            raw += f"<think>{block[1]}</think>"
    message = Message(Role.ASSISTANT, "\n".join(texts), calls=tuple(calls), reasoning=reasoning)
    talk.play(request, speaker, raw + "<|im_end|>", message)


def issued_ids(record: dict[str, Any]) -> list[str]:
    """Tool-call ids of the recorded reply, in order."""
    if "response" in record:
        message = record["response"]["choices"][0]["message"]
        return [call["id"] for call in message.get("tool_calls") or ()]
    ids = []
    for event in record["sse"]:
        for line in event.splitlines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            block = data.get("content_block") or {}
            if block.get("type") == "tool_use":
                ids.append(block["id"])
            for choice in data.get("choices") or ():
                ids += [call["id"] for call in choice["delta"].get("tool_calls") or () if call.get("id")]
    return ids
