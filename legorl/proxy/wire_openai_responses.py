"""OpenAI Responses: `/v1/responses`.

The protocol is a flat list of items. Those of one assistant turn (reasoning, then text, then calls) fold into
one message here. Nothing is stored: a request that refers to what an earlier one left behind is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from legorl.engine.base import Finish
from legorl.proxy.messages import ChatRequest, Json, Message, Reply, Role, ToolUse, join_texts, order_results
from legorl.proxy.refusal import Reason, Refusal, invalid
from legorl.proxy.responses_stream import Head, Stream, response_object
from legorl.proxy.responses_tools import ToolForm, call_item, full_name, read_tools
from legorl.proxy.wire import (
    PLACEHOLDER,
    has_text,
    note_withheld,
    read_each,
    want_flag,
    want_name,
    want_object,
    want_text,
    wishes_of,
)
from legorl.proxy.wire_openai import OpenAI

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_logprobs": "top_logprobs",
    "max_output_tokens": "max_tokens",
    "tool_choice": "tool_choice",
    "text": "response_format",
}
_STATE = ("previous_response_id", "conversation", "prompt")
_OMITTED = {
    "input_image": "image",
    "input_file": "file",
    "input_audio": "audio",
    "encrypted_content": "encrypted text",
}
_ENCRYPTED = "c2VhbGVk"
"""Clients drop reasoning that carries no encrypted content; the text itself is in the summary."""


@dataclass(frozen=True)
class _Request(ChatRequest):
    head: Head = field(default_factory=Head)
    forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """How calls are written whose tools are no plain functions, by the name the policy knows."""


class OpenAIResponses(OpenAI):
    """The wire of Codex."""

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """See `WireFormat.parse`."""
        for name in _STATE:
            if body.get(name):
                raise invalid(f"{name}: nothing is stored here; send the whole conversation as input")
        if want_flag(body.get("background"), "background"):
            raise invalid("background: a reply is only given to the request that asks for it")
        shown = body.get("input")
        items = [Message(Role.USER, shown)] if isinstance(shown, str) else read_each(shown, "input", _item)
        instructions = want_text(body.get("instructions"), "instructions")
        if not items and not instructions:
            raise invalid("input: at least one item is required")
        model = want_text(body.get("model"), "model")
        tools = read_tools(body.get("tools"))
        wishes = wishes_of(body, _WISHES)
        note_withheld(wishes, tools.withheld, len(tools.offered))
        return _Request(
            messages=order_results(
                [*([Message(Role.SYSTEM, instructions)] if instructions else ()), *_fold(items)]
            ),
            tools=tools.offered,
            model=model,
            stream=want_flag(body.get("stream"), "stream"),
            wishes=wishes,
            head=Head(model),
            forms=tools.forms,
        )

    def reply(self, reply: Reply, request: ChatRequest) -> Json:
        """See `WireFormat.reply`."""
        own = _own(request)
        return _finished(reply, own, _output(reply, own))

    def heartbeat(self, request: ChatRequest, beats: int) -> bytes:
        """See `WireFormat.heartbeat`.

        The first announces the response, which clients want to see before anything else. Later ones are
        events too, not comments: Codex counts the time since the last event.
        """
        stream = Stream(beats)
        return stream.event("keepalive") if beats else stream.opening(_own(request).head)

    def events(self, reply: Reply, request: ChatRequest, beats: int = 0) -> Iterator[bytes]:
        """See `WireFormat.events`."""
        own, stream = _own(request), Stream(beats)
        output = _output(reply, own)
        if not beats:
            yield stream.opening(own.head)
        for index, item in enumerate(output):
            yield from stream.item(index, item)
        response = _finished(reply, own, output)
        yield stream.event(f"response.{response['status']}", response=response)

    def error_event(self, refusal: Refusal, request: ChatRequest, beats: int = 0) -> bytes:
        """See `WireFormat.error_event`."""
        own, stream = _own(request), Stream(beats)
        code = "context_length_exceeded" if refusal.reason is Reason.OVERFLOW else "server_error"
        response = response_object(own.head, "failed", []) | {
            "error": {"code": code, "message": refusal.message}
        }
        opening = b"" if beats else stream.opening(own.head)
        return opening + stream.event("response.failed", response=response)

    def refuses_in_stream(self, reason: Reason) -> bool:
        """See `WireFormat.refuses_in_stream`: Codex compacts on the event, and gives up on a status."""
        return reason is Reason.OVERFLOW


class _Order(IntEnum):
    """Place of an item within its turn."""

    REASONING = 0
    TEXT = 1
    CALL = 2


@dataclass(frozen=True, slots=True)
class _Piece:
    """An item of an assistant turn."""

    order: _Order
    text: str = ""
    call: ToolUse | None = None


def _item(value: Json) -> Message | _Piece:
    item = want_object(value, "item")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    match kind:
        case "message":
            role = _ROLES.get(want_name(item.get("role"), "role"))
            if role is None:
                raise invalid(f"role: {item['role']!r} is not one of {', '.join(_ROLES)}")
            text = _text(item.get("content"), "content")
            return _Piece(_Order.TEXT, text) if role is Role.ASSISTANT else Message(role, text)
        case "function_call":
            return _call(item, want_text(item.get("arguments"), "arguments"))
        case "custom_tool_call":
            given = {"input": want_text(item.get("input"), "input")}
            return _call(item, json.dumps(given, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            text = _text(item.get("output"), "output")
            return Message(Role.TOOL, text, call_id=want_name(item.get("call_id"), "call_id"))
        case "reasoning":
            text = _text(item.get("content"), "content") or _text(item.get("summary"), "summary")
            return _Piece(_Order.REASONING, text)
        case "agent_message":  # from another agent of a Codex that has several
            return Message(Role.USER, _text(item.get("content"), "content"))
        case "item_reference":
            raise invalid(
                f"id: {item.get('id')!r} is not known: nothing is stored here; send the item itself"
            )
    raise invalid(f"type: {kind!r} is not supported")


def _call(item: Mapping[str, Json], arguments: str) -> _Piece:
    name = full_name(want_text(item.get("namespace"), "namespace"), want_text(item.get("name"), "name"))
    return _Piece(_Order.CALL, call=ToolUse(want_name(item.get("call_id"), "call_id"), name, arguments))


def _text(value: Json, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = read_each(value, where, _part)
    return join_texts(texts) if texts else ""


def _part(value: Json) -> str:
    item = want_object(value, "part")
    match item.get("type"):
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return want_text(item.get("text"), "text")
        case "refusal":
            return want_text(item.get("refusal"), "refusal")
        case "input_image" | "input_file" | "input_audio" | "encrypted_content":
            return PLACEHOLDER.format(_OMITTED[item["type"]])
    raise invalid(f"type: {item.get('type')!r} is not supported")


def _fold(items: Sequence[Message | _Piece]) -> list[Message]:
    messages: list[Message] = []
    turn: list[_Piece] = []
    for item in items:
        if isinstance(item, _Piece):
            if turn and _begins_turn(item.order, turn[-1].order):
                messages.append(_assistant(turn))
                turn = []
            turn.append(item)
            continue
        if turn:
            messages.append(_assistant(turn))
            turn = []
        messages.append(item)
    if turn:
        messages.append(_assistant(turn))
    return messages


def _begins_turn(order: _Order, last: _Order) -> bool:
    """Two turns can stand side by side; text behind a call was moved there and belongs to the same one."""
    return order < last if order is _Order.REASONING else order is last is _Order.TEXT


def _assistant(pieces: Sequence[_Piece]) -> Message:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[ToolUse] = []
    for piece in pieces:
        if piece.call is not None:
            calls.append(piece.call)
        elif piece.order is _Order.TEXT:
            texts.append(piece.text)
        elif piece.text:
            thoughts.append(piece.text)
    text, reasoning = join_texts(texts) if texts else "", join_texts(thoughts) if thoughts else ""
    return Message(Role.ASSISTANT, text, calls=tuple(calls), reasoning=reasoning)


def _own(request: ChatRequest) -> _Request:
    return request if isinstance(request, _Request) else _Request((), head=Head(request.model))


def _output(reply: Reply, request: _Request) -> list[dict[str, Json]]:
    message = reply.message
    items: list[dict[str, Json]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"id": f"rs_{request.head.id}", "type": "reasoning", "summary": summary})
        items[-1]["encrypted_content"] = _ENCRYPTED
    if has_text(message):
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{request.head.id}", "type": "message", "role": "assistant", "status": "completed"}
        items.append(head | {"content": [part]})
    for index, call in enumerate(message.calls):
        items.append(call_item(call, request.forms.get(call.name), f"{request.head.id}_{index}"))
    return items


def _finished(reply: Reply, request: _Request, output: list[dict[str, Json]]) -> dict[str, Json]:
    cut = reply.finish is Finish.LENGTH
    return response_object(request.head, "incomplete" if cut else "completed", output) | {
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }
