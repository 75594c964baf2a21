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
    want_flag,
    want_list,
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
            messages=order_results([_message(item, f"messages[{i}]") for i, item in enumerate(raw)]),
            tools=tuple(
                _tool(item, f"tools[{i}]")
                for i, item in enumerate(want_list(body.get("tools") or [], "tools"))
            ),
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


def _message(value: Json, where: str) -> Message:
    item = want_object(value, where)
    role = _ROLES.get(want_name(item.get("role"), f"{where}.role"))
    if role is None:
        raise invalid(f"{where}.role: {item['role']!r} is not one of {', '.join(_ROLES)}")
    text = _text(item.get("content"), f"{where}.content")
    if role is Role.TOOL:
        return Message(role, text, call_id=want_name(item.get("tool_call_id"), f"{where}.tool_call_id"))
    if role is not Role.ASSISTANT:
        return Message(role, text)
    calls = want_list(item.get("tool_calls") or [], f"{where}.tool_calls")
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    return Message(
        role,
        text,
        calls=tuple(_tool_use(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        reasoning=want_text(reasoning, f"{where}.reasoning_content"),
    )


def _text(value: Json, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for index, part in enumerate(want_list(value, where)):
        item = want_object(part, f"{where}[{index}]")
        kind = item.get("type")
        if kind in ("text", "refusal"):
            texts.append(want_text(item.get(kind), f"{where}[{index}].{kind}"))
        elif isinstance(kind, str) and kind in _OMITTED:
            texts.append(PLACEHOLDER.format(_OMITTED[kind]))
        else:
            raise invalid(f"{where}[{index}].type: {kind!r} is not supported")
    return join_texts(texts) if texts else ""


def _tool_use(value: Json, where: str) -> ToolUse:
    item = want_object(value, where)
    function = want_object(item.get("function"), f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients send the object itself
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolUse(
        id=want_name(item.get("id"), f"{where}.id"),
        name=want_text(function.get("name"), f"{where}.function.name"),
        arguments=want_text(arguments, f"{where}.function.arguments"),
    )


def _tool(value: Json, where: str) -> Tool:
    item = want_object(value, where)
    if item.get("type", "function") != "function":
        raise invalid(f"{where}.type: {item['type']!r} is not supported, only functions are")
    function = want_object(item.get("function"), f"{where}.function")
    return Tool(
        name=want_name(function.get("name"), f"{where}.function.name"),
        description=want_text(function.get("description"), f"{where}.function.description"),
        parameters=want_object(function.get("parameters") or {}, f"{where}.function.parameters"),
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
