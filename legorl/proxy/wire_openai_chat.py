"""OpenAI Chat Completions: `/v1/chat/completions`.

Before there were tools the protocol had functions: one call per reply, without an id. A client that offers
`functions` gets its replies so; its history is read with the function's name in the id's place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
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
    join_texts,
    order_results,
)
from legorl.proxy.refusal import Refusal, invalid
from legorl.proxy.wire import (
    PLACEHOLDER,
    note_withheld,
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
from legorl.proxy.wire_openai import OpenAI

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
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
_OMITTED = {"image_url": "image", "input_audio": "audio", "file": "file"}


@dataclass(frozen=True)
class _Request(ChatRequest):
    legacy: bool = False
    """The client offers functions, not tools."""


class OpenAIChat(OpenAI):
    """The wire of mini-swe-agent, OpenCode, OpenHands and qwen-code."""

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """See `WireFormat.parse`."""
        raw = want_messages(body)
        if body.get("n") not in (None, 1):
            raise invalid("n: only one choice is sampled per request")
        options = want_object(body.get("stream_options") or {}, "stream_options")
        functions = read_each(body.get("functions"), "functions", _function)
        tools = [*read_each(body.get("tools"), "tools", _tool), *functions]
        offered = tuple(tool for tool in tools if isinstance(tool, Tool))
        wishes = wishes_of(body, _WISHES)
        note_withheld(wishes, [tool for tool in tools if isinstance(tool, str)], len(offered))
        return _Request(
            messages=order_results(read_each(raw, "messages", _message)),
            tools=offered,
            model=want_text(body.get("model"), "model"),
            stream=want_flag(body.get("stream"), "stream"),
            include_usage=want_flag(options.get("include_usage"), "stream_options.include_usage"),
            wishes=wishes,
            legacy=bool(functions),
        )

    def reply(self, reply: Reply, request: ChatRequest) -> Json:
        """See `WireFormat.reply`."""
        message: dict[str, Json] = {"role": "assistant", "content": _content(reply.message), "refusal": None}
        if reply.message.reasoning:
            message["reasoning_content"] = reply.message.reasoning
        if reply.message.calls and _is_legacy(request):
            message["function_call"] = _function_call(reply.message.calls[0])
        elif reply.message.calls:
            message["tool_calls"] = [_call(call) for call in reply.message.calls]
        finish = _finish_reason(reply, request)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        head = _head(reply, request, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(reply)}

    def heartbeat(self, request: ChatRequest, beats: int) -> bytes:
        """See `WireFormat.heartbeat`."""
        return b": ping\n\n"

    def events(self, reply: Reply, request: ChatRequest, beats: int = 0) -> Iterator[bytes]:
        """See `WireFormat.events`."""
        head = _head(reply, request, "chat.completion.chunk")

        def chunk(delta: Json, finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return sse({**head, "choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        if reply.message.reasoning:
            yield chunk({"reasoning_content": reply.message.reasoning})
        text = _content(reply.message)
        if text:
            yield chunk({"content": text})
        calls = reply.message.calls
        if calls and _is_legacy(request):
            yield chunk({"function_call": _function_call(calls[0])})
            calls = ()
        for index, call in enumerate(calls):
            opened = {**_call(call), "index": index, "function": {"name": call.name, "arguments": ""}}
            yield chunk({"tool_calls": [opened]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        yield chunk({}, _finish_reason(reply, request))
        if request.include_usage:
            yield sse({**head, "choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error_event(self, refusal: Refusal, request: ChatRequest, beats: int = 0) -> bytes:
        """See `WireFormat.error_event`."""
        return sse(self.error(refusal))


def _message(value: Json) -> Message:
    item = want_object(value, "message")
    role = _ROLES.get(want_name(item.get("role"), "role"))
    if role is None:
        raise invalid(f"role: {item['role']!r} is not one of {', '.join(_ROLES)}")
    text = _text(item.get("content"))
    if role is Role.TOOL:
        place = "name" if item["role"] == "function" else "tool_call_id"
        return Message(role, text, call_id=want_name(item.get(place), place))
    if role is not Role.ASSISTANT:
        return Message(role, text)
    calls = read_each(item.get("tool_calls"), "tool_calls", _tool_use)
    if item.get("function_call"):
        function = want_object(item["function_call"], "function_call")
        calls.append(_called(function, want_name(function.get("name"), "function_call.name")))
    return Message(
        role,
        text,
        calls=tuple(calls),
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
    return _called(want_object(item.get("function"), "function"), want_name(item.get("id"), "id"))


def _called(function: Mapping[str, Json], call_id: str) -> ToolUse:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients send the object itself
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolUse(
        id=call_id,
        name=want_text(function.get("name"), "function.name"),
        arguments=want_text(arguments, "function.arguments"),
    )


def _tool(value: Json) -> Tool | str:
    """A tool, or the type of one that is not offered."""
    item = want_object(value, "tool")
    kind = want_text(item.get("type"), "type")
    return kind if kind not in ("", "function") else _function(item.get("function"))


def _function(value: Json) -> Tool:
    function = want_object(value, "function")
    return Tool(
        name=want_name(function.get("name"), "function.name"),
        description=want_text(function.get("description"), "function.description"),
        parameters=want_schema(function.get("parameters"), "function.parameters"),
    )


def _is_legacy(request: ChatRequest) -> bool:
    return isinstance(request, _Request) and request.legacy


def _content(message: Message) -> str | None:
    if message.calls and not message.text.strip():
        return None
    return message.text


def _call(call: ToolUse) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": _function_call(call)}


def _function_call(call: ToolUse) -> dict[str, Json]:
    return {"name": call.name, "arguments": call.arguments}


def _finish_reason(reply: Reply, request: ChatRequest) -> str:
    if reply.finish is Finish.LENGTH:
        return "length"
    if not reply.message.calls:
        return "stop"
    return "function_call" if _is_legacy(request) else "tool_calls"


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _head(reply: Reply, request: ChatRequest, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": request.model}
