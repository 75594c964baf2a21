"""OpenAI Chat Completions: `/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

from legorl.engine.base import Finish
from legorl.proxy.messages import (
    ChatRequest,
    Json,
    Message,
    Reply,
    Role,
    Tool,
    ToolUse,
    join_texts,
    order_results,
)
from legorl.proxy.refusal import Reason, Refusal, invalid
from legorl.proxy.wire import (
    PLACEHOLDER,
    WireFormat,
    compact,
    read_each,
    want_flag,
    want_messages,
    want_name,
    want_object,
    want_text,
    wishes_of,
)

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop",
    "seed": "seed",
    "tool_choice": "tool_choice",
    "response_format": "response_format",
    "logprobs": "logprobs",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_ERROR_TYPES: dict[Reason, tuple[str, str | None]] = {
    Reason.INVALID: ("invalid_request_error", None),
    Reason.OVERFLOW: ("invalid_request_error", "context_length_exceeded"),
    Reason.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    Reason.FORBIDDEN: ("permission_error", "permission_denied"),
    Reason.NOT_FOUND: ("invalid_request_error", "not_found"),
    Reason.METHOD: ("invalid_request_error", "method_not_allowed"),
    Reason.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Reason.BROKEN: ("server_error", "engine_failure"),
}
_OMITTED = {"image_url": "image", "input_audio": "audio", "file": "file"}


class OpenAIChat(WireFormat):
    """The wire of mini-swe-agent, OpenCode, OpenHands and qwen-code."""

    call_id_prefix = "call_"
    heartbeat = b": ping\n\n"

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """See `WireFormat.parse`."""
        raw = want_messages(body)
        if body.get("n") not in (None, 1):
            raise invalid("n: only one choice is sampled per request")
        options = want_object(body.get("stream_options") or {}, "stream_options")
        return ChatRequest(
            messages=order_results(read_each(raw, "messages", _message)),
            tools=tuple(read_each(body.get("tools"), "tools", _tool)),
            model=want_text(body.get("model"), "model"),
            stream=want_flag(body.get("stream"), "stream"),
            include_usage=want_flag(options.get("include_usage"), "stream_options.include_usage"),
            wishes=wishes_of(body, _WISHES),
        )

    def reply(self, reply: Reply, request: ChatRequest) -> Json:
        """See `WireFormat.reply`."""
        message: dict[str, Json] = {"role": "assistant", "content": _content(reply.message), "refusal": None}
        if reply.message.reasoning:
            message["reasoning_content"] = reply.message.reasoning
        if reply.message.calls:
            message["tool_calls"] = [_call(call) for call in reply.message.calls]
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
        head = _head(reply, request, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: Reply, request: ChatRequest) -> Iterator[bytes]:
        """See `WireFormat.events`."""
        head = _head(reply, request, "chat.completion.chunk")

        def chunk(delta: Json, finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return _event({**head, "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        if reply.message.reasoning:
            yield chunk({"reasoning_content": reply.message.reasoning})
        text = _content(reply.message)
        if text:
            yield chunk({"content": text})
        for index, call in enumerate(reply.message.calls):
            opened = {**_call(call), "index": index, "function": {"name": call.name, "arguments": ""}}
            yield chunk({"tool_calls": [opened]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        yield chunk({}, _finish_reason(reply))
        if request.include_usage:
            yield _event({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, refusal: Refusal) -> Json:
        """See `WireFormat.error`."""
        kind, code = _ERROR_TYPES[refusal.reason]
        return {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}

    def error_event(self, refusal: Refusal) -> bytes:
        """See `WireFormat.error_event`."""
        return _event(self.error(refusal))


def _message(value: Json) -> Message:
    item = want_object(value, "message")
    role = _ROLES.get(want_name(item.get("role"), "role"))
    if role is None:
        raise invalid(f"role: {item['role']!r} is not one of {', '.join(_ROLES)}")
    text = _text(item.get("content"))
    if role is Role.TOOL:
        return Message(role, text, call_id=want_name(item.get("tool_call_id"), "tool_call_id"))
    if role is not Role.ASSISTANT:
        return Message(role, text)
    return Message(
        role,
        text,
        calls=tuple(read_each(item.get("tool_calls"), "tool_calls", _tool_use)),
        reasoning=want_text(item.get("reasoning_content") or item.get("reasoning"), "reasoning_content"),
    )


def _text(value: Json) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = read_each(value, "content", _part)
    return join_texts(texts) if texts else ""


def _part(value: Json) -> str:
    item = want_object(value, "part")
    kind = want_name(item.get("type"), "type")
    if kind in ("text", "refusal"):
        return want_text(item.get(kind), kind)
    if kind in _OMITTED:
        return PLACEHOLDER.format(_OMITTED[kind])
    raise invalid(f"type: {kind!r} is not supported")


def _tool_use(value: Json) -> ToolUse:
    item = want_object(value, "call")
    function = want_object(item.get("function"), "function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients send the object itself
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolUse(
        id=want_name(item.get("id"), "id"),
        name=want_text(function.get("name"), "function.name"),
        arguments=want_text(arguments, "function.arguments"),
    )


def _tool(value: Json) -> Tool:
    item = want_object(value, "tool")
    if item.get("type", "function") != "function":
        raise invalid(f"type: {item['type']!r} is not supported, only functions are")
    function = want_object(item.get("function"), "function")
    return Tool(
        name=want_name(function.get("name"), "function.name"),
        description=want_text(function.get("description"), "function.description"),
        parameters=want_object(function.get("parameters") or {}, "function.parameters"),
    )


def _content(message: Message) -> str | None:
    if message.calls and not message.text.strip():
        return None
    return message.text


def _call(call: ToolUse) -> dict[str, Json]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish_reason(reply: Reply) -> str:
    if reply.finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if reply.message.calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _head(reply: Reply, request: ChatRequest, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": request.model}


def _event(value: Json) -> bytes:
    return b"data: " + compact(value) + b"\n\n"
