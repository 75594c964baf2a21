"""The official OpenAI and Anthropic clients judge the shapes."""

from __future__ import annotations

from pathlib import Path

import anthropic
import openai
import pytest

from legorl.proxy import invariants
from legorl.proxy.store import load, save
from tests.proxy.conftest import Stage
from tests.proxy.models import call_text

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
ANTHROPIC_TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}


def openai_client(stage: Stage, token: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stage.url() + "/v1", api_key=token, max_retries=2, timeout=10)


def anthropic_client(stage: Stage, token: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stage.url(), api_key=token, max_retries=2, timeout=10)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_conversation_with_tools(stage: Stage, stream: bool, tmp_path: Path) -> None:
    session = stage.open()
    stage.script = [call_text("bash", '{"command": "ls"}', "Let me look."), "Done."]
    client = openai_client(stage, session.token)
    messages: list = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Fix it."}]

    async def ask() -> tuple[str | None, list, str, int]:
        if not stream:
            reply = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
            choice = reply.choices[0]
            assert reply.usage is not None
            calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            return choice.message.content, calls, choice.finish_reason, reply.usage.prompt_tokens
        async with client.chat.completions.stream(
            model="any", messages=messages, tools=[TOOL], stream_options={"include_usage": True}
        ) as events:
            async for _ in events:
                pass
            final = await events.get_final_completion()
        assert final.usage is not None
        message = final.choices[0].message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        return message.content, calls, final.choices[0].finish_reason, final.usage.prompt_tokens

    text, calls, finish, first_prompt = await ask()
    assert (text, finish) == ("Let me look.\n", "tool_calls")
    assert [call[1:] for call in calls] == [("bash", '{"command": "ls"}')]
    messages.append(
        {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {
                    "id": calls[0][0],
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command":"ls"}'},
                }
            ],
        }
    )
    messages.append({"role": "tool", "tool_call_id": calls[0][0], "content": "a.py"})
    text, calls, finish, second_prompt = await ask()
    assert (text, calls, finish) == ("Done.", [], "stop")
    assert second_prompt > first_prompt
    assert stage.prompts[1].startswith(
        stage.prompts[0] + call_text("bash", '{"command": "ls"}', "Let me look.")
    )

    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.counts == {"open": 1, "extend": 1}
    (row,) = ledger.rows()
    assert len(row.calls) == 2
    assert row.routed_mask is not None
    assert row.routed_mask.all()
    save(ledger, tmp_path)
    again = load(tmp_path)
    assert invariants.check(again) == []
    assert again.rows()[0].token_ids.tolist() == row.token_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_conversation_with_tools(stage: Stage, stream: bool) -> None:
    session = stage.open()
    stage.script = [call_text("bash", '{"command": "ls"}', "Let me look."), "Done."]
    client = anthropic_client(stage, session.token)
    messages: list = [{"role": "user", "content": "Fix it."}]

    async def ask() -> anthropic.types.Message:
        wanted = {"model": "any", "max_tokens": 99, "system": "You help.", "tools": [ANTHROPIC_TOOL]}
        if not stream:
            return await client.messages.create(messages=messages, **wanted)
        async with client.messages.stream(messages=messages, **wanted) as events:
            return await events.get_final_message()

    first = await ask()
    text, call = first.content
    assert (text.type, call.type, first.stop_reason) == ("text", "tool_use", "tool_use")
    assert (call.name, call.input) == ("bash", {"command": "ls"})
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": "a.py",
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ]
    counted = await client.messages.count_tokens(
        model="any", messages=messages, system="You help.", tools=[ANTHROPIC_TOOL]
    )
    second = await ask()
    assert second.content[0].text == "Done."
    assert second.stop_reason == "end_turn"
    assert second.usage.input_tokens == counted.input_tokens
    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.counts == {"open": 1, "extend": 1}
    assert ledger.wishes == {"max_tokens": [99]}


RESPONSES_TOOLS: list = [
    {"type": "function", **TOOL["function"], "strict": False},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Helpers.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
    },
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "web_search"},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_conversation_with_tools(stage: Stage, stream: bool) -> None:
    session = stage.open()
    calls = [
        call_text("bash", '{"command": "ls"}'),
        call_text("agents__spawn", '{"task": "x"}'),
        call_text("patch", '{"input": "*** Begin"}'),
    ]
    stage.script = ["Let me look.\n" + "\n".join(calls), "Done."]
    client = openai_client(stage, session.token)
    items: list = [{"role": "user", "content": "Fix it."}]

    async def ask() -> openai.types.responses.Response:
        wanted = {"model": "any", "instructions": "You help.", "tools": RESPONSES_TOOLS, "store": False}
        if not stream:
            return await client.responses.create(input=items, **wanted)
        async with client.responses.stream(input=items, **wanted) as events:
            seen = [event async for event in events]
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            return await events.get_final_response()

    first = await ask()
    assert (first.status, first.output_text, first.model) == ("completed", "Let me look.\n", "any")
    _, bash, spawn, patch = first.output
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
    assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
    ledger = await stage.proxy.close("a")
    assert invariants.check(ledger) == []
    assert ledger.counts == {"open": 1, "extend": 1}
    assert ledger.wishes == {"withheld_tools": [["web_search"]]}
    spans = ledger.rows()[0].calls
    assert second.usage.input_tokens == spans[1].start
    assert second.usage.output_tokens == spans[1].end - spans[1].start
    assert "a.py\n[image omitted: this model reads text only]" in stage.prompts[1]
    assert stage.prompts[1].index("a.py") < stage.prompts[1].index("spawned")


async def test_models(stage: Stage) -> None:
    session = stage.open()
    assert [m.id async for m in openai_client(stage, session.token).models.list()] == ["policy"]
    assert [m.id async for m in anthropic_client(stage, session.token).models.list()] == ["policy"]


async def test_errors_have_each_protocols_own_shape(stage: Stage) -> None:
    session, other = stage.open(), stage.open("b")
    ask = {"model": "any", "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(openai.AuthenticationError) as unauthenticated:
        await openai_client(stage, "wrong").chat.completions.create(**ask)
    assert unauthenticated.value.type == "authentication_error"
    with pytest.raises(openai.PermissionDeniedError):
        await openai_client(stage, other.token).chat.completions.create(**ask)
    with pytest.raises(anthropic.AuthenticationError):
        await anthropic_client(stage, "wrong").messages.create(**ask, max_tokens=5)
    with pytest.raises(anthropic.PermissionDeniedError) as forbidden:
        await anthropic_client(stage, other.token).messages.create(**ask, max_tokens=5)
    assert forbidden.value.body["error"]["type"] == "permission_error"
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client(stage, session.token).chat.completions.create(model="any", messages=[])
    assert "messages" in str(bad.value)
    long = {"model": "any", "messages": [{"role": "user", "content": "x y z " * 4000}]}
    with pytest.raises(openai.BadRequestError) as overflow:
        await openai_client(stage, session.token).chat.completions.create(**long)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await anthropic_client(stage, session.token).messages.create(**long, max_tokens=5)
    assert session.mark == "context_overflow"
    assert session.failure is None
