"""Anthropic Messages: `/v1/messages` and `/v1/messages/count_tokens`.

A user message with tool results becomes several of ours: first the results, then what the user says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    has_text,
    note_withheld,
    object_of,
    read_each,
    sse,
    want_flag,
    want_messages,
    want_name,
    want_object,
    want_schema,
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
    Reason.TIMEOUT: "invalid_request_error",
    Reason.TOO_LARGE: "request_too_large",
    Reason.ENCODING: "invalid_request_error",
    Reason.BUSY: "rate_limit_error",
    Reason.HEADERS: "invalid_request_error",
    Reason.BROKEN: "api_error",
}
_SIGNATURE = "c2lnbmVk"
"""Clients drop thinking that carries no signature; the text itself is never trusted when it comes back."""


class Anthropic(WireFormat):
    """The wire of Claude Code."""

    call_id_prefix = "toolu_"

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """See `WireFormat.parse`."""
        shown = [
            _system(body.get("system"), "system"),
            *read_each(want_messages(body), "messages", _messages),
        ]
        messages = [message for several in shown for message in several]
        if not messages:
            raise invalid("messages: nothing but volatile lines")
        tools = read_each(body.get("tools"), "tools", _tool)
        offered = tuple(tool for tool in tools if isinstance(tool, Tool))
        wishes = wishes_of(body, _WISHES)
        note_withheld(wishes, [tool for tool in tools if isinstance(tool, str)], len(offered))
        return ChatRequest(
            messages=order_results(messages),
            tools=offered,
            model=want_text(body.get("model"), "model"),
            stream=want_flag(body.get("stream"), "stream"),
            wishes=wishes,
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

    def heartbeat(self, request: ChatRequest, beats: int) -> bytes:
        """See `WireFormat.heartbeat`."""
        return _event("ping")

    def events(self, reply: Reply, request: ChatRequest, beats: int = 0) -> Iterator[bytes]:
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
        if has_text(reply.message):
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

    def error_event(self, refusal: Refusal, request: ChatRequest, beats: int = 0) -> bytes:
        """See `WireFormat.error_event`."""
        return sse(self.error(refusal), "error")

    def token_count(self, count: int) -> Json:
        """See `WireFormat.token_count`."""
        return {"input_tokens": count}

    def models(self) -> Json:
        """See `WireFormat.models`."""
        model = {"type": "model", "id": "policy", "display_name": "policy", "lifecycle": "active"}
        model["created_at"] = "1970-01-01T00:00:00Z"
        return {"data": [model], "has_more": False, "first_id": "policy", "last_id": "policy"}


def _system(value: Json, where: str) -> Sequence[Message]:
    blocks = [value] if isinstance(value, str) else read_each(value, where, _block_text)
    texts = [text for text in blocks if not is_volatile(text)]
    return (Message(Role.SYSTEM, join_texts(texts)),) if texts else ()


def _messages(value: Json) -> Sequence[Message]:
    item = want_object(value, "message")
    role, content = want_name(item.get("role"), "role"), item.get("content")
    match role:
        case "system":
            return _system(content, "content")
        case "assistant":
            return (_assistant(content),)
        case "user":
            return _user(content)
    raise invalid(f"role: {role!r} is not user or assistant")


def _user(content: Json) -> Sequence[Message]:
    if content is None or isinstance(content, str):
        return (Message(Role.USER, content or ""),)
    blocks = read_each(content, "content", _result_or_text)
    results = [block for block in blocks if isinstance(block, Message)]
    texts = [block for block in blocks if isinstance(block, str)]
    if texts or not results:
        return (*results, Message(Role.USER, join_texts(texts) if texts else ""))
    return results


def _assistant(content: Json) -> Message:
    if content is None or isinstance(content, str):
        return Message(Role.ASSISTANT, content or "")
    blocks = read_each(content, "content", _call_thought_or_text)
    texts = [block for block in blocks if isinstance(block, str)]
    thoughts = [block.text for block in blocks if isinstance(block, _Thought) and block.text]
    return Message(
        Role.ASSISTANT,
        join_texts(texts) if texts else "",
        calls=tuple(block for block in blocks if isinstance(block, ToolUse)),
        reasoning=join_texts(thoughts) if thoughts else "",
    )


@dataclass(frozen=True, slots=True)
class _Thought:
    text: str


_PROVIDERS = ("server_tool_use", "mcp_tool_use")
"""Blocks of tools that a provider runs, and (by their ending) of what those gave."""


def _call_thought_or_text(value: Json) -> ToolUse | _Thought | str:
    item = want_object(value, "block")
    match item.get("type"):
        case "tool_use":
            arguments = json.dumps(item.get("input") or {}, ensure_ascii=False)
            return ToolUse(want_name(item.get("id"), "id"), want_text(item.get("name"), "name"), arguments)
        case "thinking":
            return _Thought(want_text(item.get("thinking"), "thinking"))
        case "redacted_thinking":
            return _Thought("")
    return _block_text(value)


def _result_or_text(value: Json) -> Message | str:
    if isinstance(value, dict) and value.get("type") == "tool_result":
        call_id, content = want_name(value.get("tool_use_id"), "tool_use_id"), value.get("content")
        if content is None or isinstance(content, str):
            return Message(Role.TOOL, content or "", call_id=call_id)
        texts = read_each(content, "content", _block_text)
        return Message(Role.TOOL, join_texts(texts) if texts else "", call_id=call_id)
    return _block_text(value)


def _block_text(value: Json) -> str:
    item = want_object(value, "block")
    match item.get("type"):
        case "text":
            return want_text(item.get("text"), "text")
        case "image" | "document" | "container_upload" | "browser_state" as kind:
            return _document(item) or PLACEHOLDER.format(kind)
        case "search_result":
            texts = read_each(item.get("content"), "content", _block_text)
            return join_texts(
                [want_text(item.get("title"), "title"), want_text(item.get("source"), "source"), *texts]
            )
        case "tool_reference":
            return f"Tool: {want_text(item.get('tool_name'), 'tool_name')}"
        case str() as kind if kind in _PROVIDERS or kind.endswith("_tool_result"):
            return PLACEHOLDER.format(kind)
    raise invalid(f"type: {item.get('type')!r} is not supported")


def _document(item: Mapping[str, Json]) -> str:
    """The text of a document that is one."""
    source = want_object(item.get("source") or {}, "source")
    return want_text(source.get("data"), "source.data") if source.get("type") == "text" else ""


def _tool(value: Json) -> Tool | str:
    """A tool, or the type of one that is not offered."""
    item = want_object(value, "tool")
    kind = want_text(item.get("type"), "type")
    if kind not in ("", "custom"):
        return kind
    return Tool(
        name=want_name(item.get("name"), "name"),
        description=want_text(item.get("description"), "description"),
        parameters=want_schema(item.get("input_schema"), "input_schema"),
    )


def _blocks(message: Message) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
    if has_text(message):
        blocks.append({"type": "text", "text": message.text})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _input(arguments: str) -> dict[str, Json]:
    """The protocol wants an object; arguments that are none are handed over as text under one key."""
    value = object_of(arguments)
    return {"arguments": arguments} if value is None else value


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
    return sse({"type": name, **fields}, name)
