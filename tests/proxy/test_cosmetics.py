"""A history in any spelling of any wire is the same: what harnesses change without meaning it extends."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legorl.proxy.messages import Message, Role, ToolUse
from legorl.proxy.render import Renderer
from legorl.proxy.wire import WireFormat
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat
from legorl.proxy.wire_openai_responses import OpenAIResponses
from tests.proxy.models import call_text
from tests.proxy.talk import Talk, result, user

Json = Any
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
REPLIES = [
    "Done.",
    " spaced \n",
    call_text("bash", '{"command": "caf\\u00e9", "n": 5e3}', "Look."),
    call_text("bash", '{"b": 1, "a": null}') + "\n" + call_text("bash", '{"command": "b"}'),
    call_text("bash", '{"command": "x"}', "  "),
]


class Spelling:
    """Choices that mean nothing."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def coin(self) -> bool:
        return self.random.random() < 0.5

    def shuffled(self, items: list[Json]) -> list[Json]:
        return self.random.sample(items, len(items))

    def mixed(self, value: dict[str, Json]) -> dict[str, Json]:
        """Keys in another order."""
        return dict(self.shuffled(list(value.items())))

    def text(self, text: str, kind: str = "text") -> Json:
        """A string or a list of one text, perhaps with a mark."""
        if self.coin():
            return text
        block = {"type": kind, "text": text}
        if kind == "text" and self.coin():
            block["cache_control"] = {"type": "ephemeral"}
        return [self.mixed(block)]

    def arguments(self, raw: str) -> str:
        """The same JSON, written otherwise; with a default added, a null dropped."""
        value = json.loads(raw)
        if self.coin():
            value = {name: inner for name, inner in value.items() if inner is not None}
        if self.coin():
            value = {"replace_all": False, **value}
        separators = (",", ":") if self.coin() else None
        return json.dumps(self.mixed(value), ensure_ascii=self.coin(), separators=separators)


def runs(history: list[Message]) -> list[list[Message]]:
    """Runs of tool results stay together, everything else stands alone."""
    found: list[list[Message]] = []
    for message in history:
        if message.role is Role.TOOL and found and found[-1][0].role is Role.TOOL:
            found[-1].append(message)
        else:
            found.append([message])
    return found


def anthropic(history: list[Message], spell: Spelling) -> Json:
    messages: list[Json] = []
    for run in runs(history):
        message = run[0]
        if message.role is Role.TOOL:
            blocks = [
                spell.mixed({"type": "tool_result", "tool_use_id": m.call_id, "content": spell.text(m.text)})
                for m in spell.shuffled(run)
            ]
            messages.append({"role": "user", "content": blocks})
        elif message.role is Role.ASSISTANT:
            calls = [
                spell.mixed(
                    {
                        "type": "tool_use",
                        "id": c.id,
                        "name": c.name,
                        "input": json.loads(spell.arguments(c.arguments)),
                    }
                )
                for c in message.calls
            ]
            shown = message.text.strip() or not calls
            texts = [{"type": "text", "text": message.text}] if shown else []
            messages.append(
                {"role": "assistant", "content": calls + texts if spell.coin() else texts + calls}
            )
        else:
            messages.append({"role": "user", "content": spell.text(message.text)})
    billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={spell.random.random()};"}
    system = [billing] if spell.coin() else []
    tool = {"name": "bash", "description": "Run.", "input_schema": spell.mixed(PARAMETERS)}
    return {
        "system": [*system, {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
        "messages": messages,
        "tools": [spell.mixed(tool)],
        "max_tokens": 9,
    }


def chat(history: list[Message], spell: Spelling) -> Json:
    messages: list[Json] = [{"role": "system", "content": spell.text("You help.")}]
    for message in (m for run in runs(history) for m in spell.shuffled(run)):
        item: dict[str, Json] = {"role": message.role.value, "content": spell.text(message.text)}
        if message.role is Role.TOOL:
            item["tool_call_id"] = message.call_id
        if message.calls:
            item["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": spell.mixed({"name": c.name, "arguments": spell.arguments(c.arguments)}),
                }
                for c in message.calls
            ]
            if not message.text.strip():
                item |= {"content": spell.random.choice([None, "", []])}
                if spell.coin():
                    del item["content"]
        messages.append(spell.mixed(item))
    function = {"name": "bash", "description": "Run.", "parameters": spell.mixed(PARAMETERS)}
    return {"messages": messages, "tools": [{"type": "function", "function": spell.mixed(function)}]}


def responses(history: list[Message], spell: Spelling) -> Json:
    items: list[Json] = [{"role": "developer", "content": spell.text("You help.", "input_text")}]
    for message in (m for run in runs(history) for m in spell.shuffled(run)):
        if message.role is Role.TOOL:
            output = {"type": "function_call_output", "call_id": message.call_id}
            items.append(spell.mixed({**output, "output": spell.text(message.text, "input_text")}))
            continue
        kind = "output_text" if message.role is Role.ASSISTANT else "input_text"
        said = {"role": message.role.value, "content": spell.text(message.text, kind)}
        calls = [
            {
                "type": "function_call",
                "call_id": c.id,
                "name": c.name,
                "arguments": spell.arguments(c.arguments),
            }
            for c in message.calls
        ]
        texts = (
            [said | ({"type": "message"} if spell.coin() else {})]
            if message.text.strip() or not calls
            else []
        )
        items += calls + texts if spell.coin() else texts + calls
    tool = {"type": "function", "name": "bash", "description": "Run.", "parameters": spell.mixed(PARAMETERS)}
    return {"input": items, "tools": [spell.mixed(tool)]}


WIRES: dict[str, tuple[WireFormat, Callable[[list[Message], Spelling], Json]]] = {
    "anthropic": (Anthropic(), anthropic),
    "chat": (OpenAIChat(), chat),
    "responses": (OpenAIResponses(), responses),
}


@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(replies=st.lists(st.sampled_from(REPLIES), min_size=1, max_size=7), seed=st.integers(0, 10_000))
def test_every_spelling_extends(renderer: Renderer, name: str, replies: list[str], seed: int) -> None:
    wire, show = WIRES[name]
    talk, spell = Talk(renderer), Spelling(seed)
    history = [user("Fix it.")]
    for number, reply in enumerate(replies):
        request = wire.parse(show(history, spell))
        turn = talk.ask(request.messages, reply, tools=tuple(request.tools))
        calls = tuple(ToolUse(c.id, c.name, c.arguments) for c in turn.message.calls)
        history.append(Message(Role.ASSISTANT, turn.message.text, calls=calls))
        history += [result(call, f"output {number}") for call in calls] or [user(f"Go on {number}.")]
    assert talk.kinds() == ["open", *["extend"] * (len(replies) - 1)]
    talk.audit()
    assert len(talk.ledger.rows()) == 1
