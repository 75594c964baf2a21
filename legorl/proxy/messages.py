"""The conversation as the proxy thinks of it, whatever wire it came in on.

Invariant: two requests that mean the same conversation give equal messages. What harnesses change without
meaning it is gone here: cache marks, a list of one text against a string, null against "" against absent,
the order of keys, the order in which parallel tool results completed, lines declared volatile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from legorl.engine.base import Finish

Json = Any
"""A decoded JSON value."""

VOLATILE_SYSTEM_LINES = ("x-anthropic-billing-header:",)
"""Prefixes of system lines that harnesses put in for their provider and change from request to request."""


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call in an assistant message; `arguments` is raw text, usually a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `calls` and `reasoning` belong to assistants, `call_id` to tool results."""

    role: Role
    text: str = ""
    calls: tuple[ToolUse, ...] = ()
    reasoning: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Tool:
    """A tool offered to the policy; `parameters` is its JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Json]

    @cached_property
    def key(self) -> str:
        """Canonical text: equal exactly when the tools are, key order apart."""
        return json.dumps([self.name, self.description, self.parameters], sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class ChatRequest:
    """A request for one reply."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    """OpenAI streams report usage only when asked."""
    wishes: Mapping[str, Json] = field(default_factory=dict)
    """Sampling parameters the harness asked for; recorded, never followed."""

    @cached_property
    def tools_key(self) -> str:
        """Canonical text of the tool list: equal exactly when the tools are, key order apart."""
        return f"[{', '.join(tool.key for tool in self.tools)}]"


@dataclass(frozen=True)
class Reply:
    """One reply, ready to be rendered on a wire. Token counts are those of the engine's call."""

    id: str
    message: Message
    finish: Finish
    prompt_tokens: int
    completion_tokens: int


def join_texts(texts: Sequence[str]) -> str:
    """The text of a message that came as several blocks."""
    return texts[0] if len(texts) == 1 else "\n".join(texts)


def is_volatile(text: str) -> bool:
    """Whether a system block is one of the declared volatile lines."""
    return text.startswith(VOLATILE_SYSTEM_LINES)


def order_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put each run of tool results into the order of the calls they answer.

    Harnesses list parallel results as they complete, so the same history can come in several orders; and a
    template that names no call ids leaves the policy only the position to tell results apart.
    """
    ordered = list(messages)
    start = 0
    calls: tuple[ToolUse, ...] = ()
    while start < len(ordered):
        message = ordered[start]
        if message.role is not Role.TOOL:
            if message.role is Role.ASSISTANT:
                calls = message.calls
            start += 1
            continue
        end = start + 1
        while end < len(ordered) and ordered[end].role is Role.TOOL:
            end += 1
        if end - start > 1:
            rank = {call.id: index for index, call in enumerate(calls)}
            ordered[start:end] = sorted(ordered[start:end], key=lambda m: rank.get(m.call_id, len(rank)))
        start = end
    return tuple(ordered)


def message_to_json(message: Message) -> dict[str, Json]:
    """A JSON-able dict without empty fields."""
    data: dict[str, Json] = {"role": message.role.value, "text": message.text}
    if message.calls:
        data["calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.calls]
    if message.reasoning:
        data["reasoning"] = message.reasoning
    if message.call_id:
        data["call_id"] = message.call_id
    return data


def message_from_json(data: Mapping[str, Json]) -> Message:
    """Inverse of `message_to_json`."""
    return Message(
        role=Role(data["role"]),
        text=data["text"],
        calls=tuple(ToolUse(**call) for call in data.get("calls", ())),
        reasoning=data.get("reasoning", ""),
        call_id=data.get("call_id", ""),
    )
