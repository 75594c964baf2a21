"""The official Anthropic and OpenAI clients judge the shapes, on real connections.

Besides what the clients make of the answers, every document and every event is read strictly against the
clients' own types: the clients themselves would let much pass.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from legorl.proxy import invariants
from legorl.proxy.store import load, save
from tests.proxy.conftest import Stage
from tests.proxy.models import call_text

BASH = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CHAT_TOOLS: list = [{"type": "function", "function": BASH}]
ANTHROPIC_TOOLS: list = [
    {"name": "bash", "description": "Run a command.", "input_schema": BASH["parameters"]},
    {"type": "web_search_20250305", "name": "web_search"},
]
RESPONSES_TOOLS: list = [
    {"type": "function", **BASH, "strict": False},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Helpers.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "web_search"},
]
LS, PWD = call_text("bash", '{"command": "ls"}'), call_text("bash", '{"command": "pwd"}')
PARALLEL = f"<think>Two things at once.</think>Let me look.\n{LS}\n{PWD}"
ASK: Any = {"model": "any", "messages": [{"role": "user", "content": "Hello?"}]}


def openai_client(stage: Stage, token: str, timeout: float = 20) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes longer than the tests
    return openai.AsyncOpenAI(
        base_url=stage.url() + "/v1", api_key=token, max_retries=2, timeout=timeout, http_client=http
    )


def anthropic_client(stage: Stage, token: str, timeout: float = 20) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(
        base_url=stage.url(), api_key=token, max_retries=2, timeout=timeout, http_client=http
    )


async def read_events(stage: Stage, token: str, endpoint: str, body: dict) -> AsyncIterator[Any]:
    """The data of a raw stream's events."""
    async with httpx.AsyncClient(timeout=20, verify=False) as client:
        headers = {"authorization": f"Bearer {token}"}
        reply = await client.post(
            f"{stage.url()}/v1/{endpoint}", json={**body, "stream": True}, headers=headers
        )
    assert reply.headers["content-type"].startswith("text/event-stream")
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(stage: Stage, stream: bool, tmp_path: Path) -> None:
    session = stage.open()
    stage.script = [PARALLEL, "Done."]
    client = openai_client(stage, session.token)
    messages: list = [{"role": "developer", "content": "You help."}, {"role": "user", "content": "Fix it."}]

    async def ask() -> ChatCompletion:
        wanted: Any = {"model": "any", "messages": messages, "tools": CHAT_TOOLS}
        if not stream:
            return await client.chat.completions.create(**wanted)
        options = {"include_usage": True}
        async with client.chat.completions.stream(**wanted, stream_options=options) as events:
            async for _ in events:
                pass
            return await events.get_final_completion()

    first = await ask()
    (choice,) = first.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.\n", "tool_calls")
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "Two things at once."
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls] == ['{"command": "ls"}', '{"command": "pwd"}']
    shown = [call.model_dump(include={"id", "type", "function"}) for call in calls]
    shown[0]["function"] = {"name": "bash", "arguments": '{"command":"ls"}'}  # re-serialised
    messages.append({"role": "assistant", "content": "Let me look.\n", "tool_calls": shown})
    messages.append({"role": "tool", "tool_call_id": calls[1].id, "content": "/here"})
    messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "a.py"})
    second = await ask()
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Done.", "stop")
    assert stage.prompts[1].startswith(stage.prompts[0] + PARALLEL)
    assert stage.prompts[1].index("a.py") < stage.prompts[1].index("/here")

    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.counts == {"open": 1, "extend": 1}
    (row,) = ledger.rows()
    for answer, call in zip((first, second), row.calls, strict=True):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == call.start
        assert answer.usage.completion_tokens == call.end - call.start
    save(ledger, tmp_path)
    again = load(tmp_path)
    assert invariants.check(again) == []
    assert again.rows()[0].token_ids.tolist() == row.token_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_with_functions_as_they_were_before_tools(stage: Stage, stream: bool) -> None:
    session = stage.open()
    stage.script = [LS, "Done."]
    client = openai_client(stage, session.token)
    messages: list = [{"role": "user", "content": "Fix it."}]
    wanted: Any = {"model": "any", "messages": messages, "functions": [BASH]}
    if stream:
        called, finish = {"name": "", "arguments": ""}, None
        async for chunk in await client.chat.completions.create(**wanted, stream=True):
            given = chunk.choices[0].delta.function_call
            if given is not None:
                called = {"name": given.name, "arguments": given.arguments}
            finish = chunk.choices[0].finish_reason or finish
    else:
        (choice,) = (await client.chat.completions.create(**wanted)).choices
        assert choice.message.function_call is not None
        called, finish = choice.message.function_call.model_dump(), choice.finish_reason
    assert (called, finish) == ({"name": "bash", "arguments": '{"command": "ls"}'}, "function_call")
    messages.append({"role": "assistant", "content": None, "function_call": called})
    messages.append({"role": "function", "name": "bash", "content": "a.py"})
    assert (await client.chat.completions.create(**wanted)).choices[0].message.content == "Done."
    assert "a.py" in stage.prompts[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic(stage: Stage, stream: bool) -> None:
    session = stage.open()
    stage.script = [PARALLEL, "Done."]
    client = anthropic_client(stage, session.token)
    messages: list = [{"role": "user", "content": "Fix it."}]
    system = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]

    async def ask() -> anthropic.types.Message:
        wanted: Any = {"model": "any", "max_tokens": 99, "system": system, "tools": ANTHROPIC_TOOLS}
        if not stream:
            return await client.messages.create(messages=messages, **wanted)
        async with client.messages.stream(messages=messages, **wanted) as events:
            return await events.get_final_message()

    first = await ask()
    thinking, text, ls, pwd = first.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Two things at once.")
    assert thinking.signature
    assert (text.type, text.text, first.stop_reason) == ("text", "Let me look.\n", "tool_use")
    assert (ls.type, ls.name, ls.input, pwd.input) == (
        "tool_use",
        "bash",
        {"command": "ls"},
        {"command": "pwd"},
    )
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    results = [
        {"type": "tool_result", "tool_use_id": pwd.id, "content": [{"type": "text", "text": "/here"}, image]},
        {
            "type": "tool_result",
            "tool_use_id": ls.id,
            "content": "a.py",
            "cache_control": {"type": "ephemeral"},
        },
    ]
    messages += [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *first.content]},
        {"role": "user", "content": results},
        {"role": "system", "content": "A notice."},
    ]
    counted = await client.messages.count_tokens(
        model="any", messages=messages, system=system, tools=ANTHROPIC_TOOLS
    )
    second = await ask()
    assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")
    assert second.usage.input_tokens == counted.input_tokens
    assert stage.prompts[1].startswith(stage.prompts[0] + PARALLEL)
    assert "/here\n[image omitted: this model reads text only]" in stage.prompts[1]
    assert "system\nA notice." in stage.prompts[1]
    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.counts == {"open": 1, "extend": 1}
    assert ledger.wishes == {"max_tokens": [99], "withheld_tools": [["web_search_20250305"]]}
    for answer, call in zip((first, second), ledger.rows()[0].calls, strict=True):
        assert answer.usage.input_tokens == call.start
        assert answer.usage.output_tokens == call.end - call.start


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(stage: Stage, stream: bool) -> None:
    session = stage.open()
    calls = [LS, call_text("agents__spawn", '{"task": "x"}'), call_text("patch", '{"input": "*** Begin"}')]
    stage.script = ["<think>Three things.</think>Let me look.\n" + "\n".join(calls), "Done."]
    client = openai_client(stage, session.token)
    items: list = [{"role": "user", "content": "Fix it."}]

    async def ask() -> Response:
        wanted: Any = {"model": "any", "instructions": "You help.", "tools": RESPONSES_TOOLS, "store": False}
        if not stream:
            return await client.responses.create(input=items, **wanted)
        async with client.responses.stream(input=items, **wanted) as events:
            seen = [event async for event in events]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            return await events.get_final_response()

    first = await ask()
    assert (first.status, first.output_text, first.model) == ("completed", "Let me look.\n", "any")
    reasoning, _, bash, spawn, patch = first.output
    assert (reasoning.type, reasoning.summary[0].text) == ("reasoning", "Three things.")
    assert reasoning.encrypted_content
    assert (bash.type, bash.name, bash.arguments) == ("function_call", "bash", '{"command": "ls"}')
    assert (spawn.type, spawn.namespace, spawn.name) == ("function_call", "agents", "spawn")
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin")
    items += [item.to_dict() for item in first.output]
    items += [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "patched"},
        {"type": "function_call_output", "call_id": spawn.call_id, "output": "spawned"},
        {
            "type": "function_call_output",
            "call_id": bash.call_id,
            "output": [{"type": "input_text", "text": "a.py"}, {"type": "input_image", "image_url": "data:"}],
        },
    ]
    counted = await client.responses.input_tokens.count(
        model="any", input=items, instructions="You help.", tools=RESPONSES_TOOLS
    )
    second = await ask()
    assert (second.output_text, second.status) == ("Done.", "completed")
    assert second.usage is not None
    assert second.usage.input_tokens == counted.input_tokens
    assert "a.py\n[image omitted: this model reads text only]" in stage.prompts[1]
    assert stage.prompts[1].index("a.py") < stage.prompts[1].index("spawned")
    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.counts == {"open": 1, "extend": 1}
    assert ledger.wishes == {"withheld_tools": [["web_search"]]}
    for answer, call in zip((first, second), ledger.rows()[0].calls, strict=True):
        assert answer.usage is not None
        assert answer.usage.input_tokens == call.start
        assert answer.usage.output_tokens == call.end - call.start
        assert answer.usage.total_tokens == call.end


@pytest.mark.parametrize("cut", [False, True])
async def test_every_document_and_event_is_of_the_clients_own_types(stage: Stage, cut: bool) -> None:
    session = stage.open(max_tokens=3 if cut else 200)
    stage.script = [f"<think>Hm.</think>So.\n{LS}\n{call_text('patch', '{}')}"]
    items = {"model": "any", "input": "Hello?", "tools": RESPONSES_TOOLS}
    asked = {**ASK, "max_tokens": 9, "stream_options": {"include_usage": True}}

    async def document(endpoint: str, body: dict) -> Any:
        async with httpx.AsyncClient(timeout=20, verify=False) as client:
            headers = {"x-api-key": session.token}
            return (await client.post(f"{stage.url()}/v1/{endpoint}", json=body, headers=headers)).json()

    ChatCompletion.model_validate(await document("chat/completions", {**ASK, "tools": CHAT_TOOLS}))
    anthropic.types.Message.model_validate(await document("messages", {**asked, "tools": ANTHROPIC_TOOLS}))
    Response.model_validate(await document("responses", items))
    judges: list[tuple[str, Any, dict]] = [
        ("chat/completions", ChatCompletionChunk, {**asked, "tools": CHAT_TOOLS}),
        ("messages", anthropic.types.RawMessageStreamEvent, {**asked, "tools": ANTHROPIC_TOOLS}),
        ("responses", ResponseStreamEvent, items),
    ]
    for endpoint, kind, body in judges:
        judge = TypeAdapter(kind)
        events = [
            judge.validate_python(event) async for event in read_events(stage, session.token, endpoint, body)
        ]
        assert len(events) >= 4
    assert events[-1].type == ("response.incomplete" if cut else "response.completed")


async def test_models(stage: Stage) -> None:
    session = stage.open()
    assert [m.id async for m in openai_client(stage, session.token).models.list()] == ["policy"]
    (model,) = [m async for m in anthropic_client(stage, session.token).models.list()]
    assert anthropic.types.ModelInfo.model_validate(model.to_dict()).id == "policy"


LONG = "x y z " * 4000
OPENAI_ERRORS: list[tuple[str, type[openai.APIStatusError], str | None]] = [
    ("wrong token", openai.AuthenticationError, "invalid_api_key"),
    ("other's token", openai.PermissionDeniedError, "permission_denied"),
    ("bad", openai.BadRequestError, None),
    ("overflow", openai.BadRequestError, "context_length_exceeded"),
    ("unknown", openai.NotFoundError, "not_found"),
]


@pytest.mark.parametrize(("case", "error", "code"), OPENAI_ERRORS)
@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_openai_errors(stage: Stage, case: str, error: type, code: str | None, endpoint: str) -> None:
    session, other = stage.open(), stage.open("b")
    token = {"wrong token": "wrong", "other's token": other.token}.get(case, session.token)
    client = openai_client(stage, token)
    text: Any = {"bad": 5, "overflow": LONG}.get(case, "x")
    with pytest.raises(error) as refused:
        if case == "unknown":
            await client.embeddings.create(model="any", input="x")
        elif endpoint == "chat":
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
        else:
            await client.responses.create(model="any", input=text)
    assert refused.value.code == code
    assert refused.value.type
    assert session.failure is None
    assert session.mark == ("context_overflow" if case == "overflow" else None)


ANTHROPIC_ERRORS: list[tuple[str, type[anthropic.APIStatusError], str]] = [
    ("wrong token", anthropic.AuthenticationError, "authentication_error"),
    ("other's token", anthropic.PermissionDeniedError, "permission_error"),
    ("bad", anthropic.BadRequestError, "invalid_request_error"),
    ("overflow", anthropic.BadRequestError, "invalid_request_error"),
    ("unknown", anthropic.NotFoundError, "not_found_error"),
]


@pytest.mark.parametrize(("case", "error", "kind"), ANTHROPIC_ERRORS)
async def test_anthropic_errors(stage: Stage, case: str, error: type, kind: str) -> None:
    session, other = stage.open(), stage.open("b")
    token = {"wrong token": "wrong", "other's token": other.token}.get(case, session.token)
    client = anthropic_client(stage, token)
    text: Any = {"bad": 5, "overflow": LONG}.get(case, "x")
    with pytest.raises(error) as refused:
        if case == "unknown":
            await client.messages.batches.retrieve("x")
        else:
            await client.messages.create(
                model="any", max_tokens=5, messages=[{"role": "user", "content": text}]
            )
    assert refused.value.body["error"]["type"] == kind
    assert ("prompt is too long" in str(refused.value)) == (case == "overflow")
    assert session.failure is None
    assert session.mark == ("context_overflow" if case == "overflow" else None)


async def test_overflow_ends_a_responses_stream_as_codex_reads_it(stage: Stage) -> None:
    session = stage.open()
    stream = await openai_client(stage, session.token).responses.create(model="any", input=LONG, stream=True)
    created, progress, failed = [event async for event in stream]
    assert (created.type, progress.type) == ("response.created", "response.in_progress")
    assert failed.type == "response.failed"
    assert failed.response.id == created.response.id
    assert failed.response.error is not None
    assert failed.response.error.code == "context_length_exceeded"
    assert session.mark == "context_overflow"


async def test_a_reference_to_what_is_not_stored_is_a_clear_error(stage: Stage) -> None:
    client = openai_client(stage, stage.open().token)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        await client.responses.create(model="any", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        await client.responses.create(model="any", input=[{"type": "item_reference", "id": "rs_1"}])
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")


async def test_too_much_at_once_is_429_and_clients_ask_again(stage: Stage) -> None:
    held = asyncio.Event()
    stage.hold = held.wait
    session = stage.open(trial_tokens=300, max_tokens=200)
    client = openai_client(stage, session.token)
    first = asyncio.create_task(client.chat.completions.create(**ASK))
    while not stage.engine.running:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)
    other: Any = {"model": "any", "messages": [{"role": "user", "content": "And now?"}]}
    with pytest.raises(openai.RateLimitError):
        await client.with_options(max_retries=0).chat.completions.create(**other)
    again = asyncio.create_task(client.with_options(max_retries=4).chat.completions.create(**other))
    await asyncio.sleep(0.2)
    held.set()
    for reply in (await first, await again):
        assert reply.choices[0].message.content == "Hello."
    assert (session.mark, session.failure) == (None, None)
