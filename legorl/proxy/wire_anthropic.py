"""Anthropic Messages: `/v1/messages` and `/v1/messages/count_tokens`.

A user message with tool results becomes several of ours: first the results, then what the user says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from legorl.engine.base import Finish
from legorl.proxy.messages import (
    ChatRequest,
    Json,
    Message,
    Reply,
    Role,
    Tool,
    ToolUse,
    is_volatile,
    join_texts,
    order_results,
)
from legorl.proxy.refusal import Reason, Refusal, invalid
from legorl.proxy.wire import (
    PLACEHOLDER,
    WireFormat,
    compact,
    want_flag,
    want_list,
    want_messages,
    want_name,
    want_object,
    want_text,
    wishes_of,
)

_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "tool_choice": "tool_choice",
}
_ERROR_TYPES = {
    Reason.INVALID: "invalid_request_error",
    Reason.OVERFLOW: "invalid_request_error",
    Reason.UNAUTHENTICATED: "authentication_error",
    Reason.FORBIDDEN: "permission_error",
    Reason.NOT_FOUND: "not_found_error",
    Reason.METHOD: "invalid_request_error",
    Reason.TOO_LARGE: "request_too_large",
    Reason.BROKEN: "api_error",
}
_SIGNATURE = "c2lnbmVk"
"""Clients drop thinking that carries no signature; the text itself is never trusted when it comes back."""


class Anthropic(WireFormat):
    """The wire of Claude Code."""

    call_id_prefix = "toolu_"
    heartbeat = b'event: ping\ndata: {"type":"ping"}\n\n'

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """See `WireFormat.parse`."""
        messages = list(_system(body.get("system"), "system"))
        for index, item in enumerate(want_messages(body)):
            messages.extend(_messages(item, f"messages[{index}]"))
        if not messages:
            raise invalid("messages: nothing but volatile lines")
        tools = want_list(body.get("tools") or [], "tools")
        return ChatRequest(
            messages=order_results(messages),
            tools=tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(tools)),
            model=want_text(body.get("model"), "model"),
            stream=want_flag(body.get("stream"), "stream"),
            wishes=wishes_of(body, _WISHES),
        )

    def reply(self, reply: Reply, request: ChatRequest) -> Json:
        """See `WireFormat.reply`."""
        return {
            **_head(reply, request),
            "content": _blocks(reply.message),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": None,
            "usage": _usage(reply, reply.completion_tokens),
        }

    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        """See `WireFormat.events`."""
        start = {**_head(reply, request), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**start, "usage": _usage(reply, 0)})
        blocks: list[tuple[Json, list[Json]]] = []
        if reply.message.reasoning:
            deltas: list[Json] = [
                {"type": "thinking_delta", "thinking": reply.message.reasoning},
                {"type": "signature_delta", "signature": _SIGNATURE},
            ]
            blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
        if _has_text(reply.message):
            delta = {"type": "text_delta", "text": reply.message.text}
            blocks.append(({"type": "text", "text": ""}, [delta]))
        for call in reply.message.calls:
            opened = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            blocks.append((opened, [{"type": "input_json_delta", "partial_json": call.arguments}]))
        for index, (block, parts) in enumerate(blocks):
            yield _event("content_block_start", index=index, content_block=block)
            for part in parts:
                yield _event("content_block_delta", index=index, delta=part)
            yield _event("content_block_stop", index=index)
        stop = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        yield _event("message_delta", delta=stop, usage=_usage(reply, reply.completion_tokens))
        yield _event("message_stop")

    def error(self, refusal: Refusal) -> Json:
        """See `WireFormat.error`."""
        message = refusal.message
        if refusal.reason is Reason.OVERFLOW:
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": _ERROR_TYPES[refusal.reason], "message": message}}

    def error_event(self, refusal: Refusal) -> bytes:
        """See `WireFormat.error_event`."""
        return b"event: error\ndata: " + compact(self.error(refusal)) + b"\n\n"


def _system(value: Json, where: str) -> Sequence[Message]:
    if value is None:
        return ()
    blocks = [value] if isinstance(value, str) else [_block_text(b, where) for b in want_list(value, where)]
    texts = [text for text in blocks if not is_volatile(text)]
    return (Message(Role.SYSTEM, join_texts(texts)),) if texts else ()


def _messages(value: Json, where: str) -> Sequence[Message]:
    item = want_object(value, where)
    role = want_name(item.get("role"), f"{where}.role")
    content = item.get("content")
    where = f"{where}.content"
    if role == "system":
        return _system(content, where)
    if role not in ("user", "assistant"):
        raise invalid(f"{where[: -len('.content')]}.role: {role!r} is not user or assistant")
    blocks = [content or ""] if content is None or isinstance(content, str) else want_list(content, where)
    if role == "assistant":
        return (_assistant(blocks, where),)
    results, texts = [], []
    for index, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            results.append(_result(block, f"{where}[{index}]"))
        else:
            texts.append(_block_text(block, f"{where}[{index}]"))
    if texts or not results:
        return (*results, Message(Role.USER, join_texts(texts) if texts else ""))
    return results


def _assistant(blocks: Sequence[Json], where: str) -> Message:
    texts, calls, reasoning = [], [], []
    for index, block in enumerate(blocks):
        here = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            name = want_text(block.get("name"), f"{here}.name")
            calls.append(ToolUse(want_name(block.get("id"), f"{here}.id"), name, arguments))
        elif kind == "thinking":
            reasoning.append(want_text(block.get("thinking"), f"{here}.thinking"))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, here))
    return Message(
        Role.ASSISTANT,
        join_texts(texts) if texts else "",
        calls=tuple(calls),
        reasoning=join_texts(reasoning) if reasoning else "",
    )


def _result(block: Mapping[str, Json], where: str) -> Message:
    call_id = want_name(block.get("tool_use_id"), f"{where}.tool_use_id")
    content = block.get("content")
    if content is None or isinstance(content, str):
        return Message(Role.TOOL, content or "", call_id=call_id)
    blocks = want_list(content, f"{where}.content")
    texts = [_block_text(part, f"{where}.content[{i}]") for i, part in enumerate(blocks)]
    return Message(Role.TOOL, join_texts(texts) if texts else "", call_id=call_id)


def _block_text(block: Json, where: str) -> str:
    if isinstance(block, str):
        return block
    item = want_object(block, where)
    kind = item.get("type")
    if kind == "text":
        return want_text(item.get("text"), f"{where}.text")
    if kind in ("image", "document"):
        return PLACEHOLDER.format(kind)
    if kind == "tool_reference":
        return f"Tool: {want_text(item.get('tool_name'), f'{where}.tool_name')}"
    raise invalid(f"{where}.type: {kind!r} is not supported")


def _tool(value: Json, where: str) -> Tool:
    item = want_object(value, where)
    if item.get("type") not in (None, "custom"):
        raise invalid(f"{where}.type: {item['type']!r} is run by the provider and not supported")
    return Tool(
        name=want_name(item.get("name"), f"{where}.name"),
        description=want_text(item.get("description"), f"{where}.description"),
        parameters=want_object(item.get("input_schema") or {}, f"{where}.input_schema"),
    )


def _has_text(message: Message) -> bool:
    return bool(message.text.strip()) if message.calls or message.reasoning else bool(message.text)


def _blocks(message: Message) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
    if _has_text(message):
        blocks.append({"type": "text", "text": message.text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _input(arguments: str) -> dict[str, Json]:
    """The protocol wants an object; arguments that are none are handed over as text under one key."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _stop_reason(reply: Reply) -> str:
    if reply.finish is Finish.LENGTH:
        return "max_tokens"
    return "tool_use" if reply.message.calls else "end_turn"


def _usage(reply: Reply, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _head(reply: Reply, request: ChatRequest) -> dict[str, Json]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": request.model}


def _event(name: str, **fields: Json) -> bytes:
    return f"event: {name}\n".encode() + b"data: " + compact({"type": name, **fields}) + b"\n\n"
