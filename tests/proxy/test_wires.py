"""What means the same gives the same messages, on all three wires."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legorl.engine.base import Finish
from legorl.proxy import app, listener, session
from legorl.proxy.messages import ChatRequest, Message, Reply, Role, ToolUse
from legorl.proxy.refusal import Reason, Refusal
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat
from legorl.proxy.wire_openai_responses import OpenAIResponses

HELLO = Message(Role.USER, "hello")
SAME_OPENAI = [
    {"content": "hello", "role": "user"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "hello", "name": None, "unknown_beta": {"x": 1}},
]


@pytest.mark.parametrize("message", SAME_OPENAI)
def test_openai_forms_of_one_message(message: dict) -> None:
    assert OpenAIChat().parse({"messages": [message]}).messages == (HELLO,)


@pytest.mark.parametrize(
    "content", [None, "", [], [{"type": "text", "text": ""}], [{"type": "text", "text": None}]]
)
@pytest.mark.parametrize("wire", [OpenAIChat(), Anthropic()])
def test_null_empty_and_absent_are_one(wire: OpenAIChat | Anthropic, content: object) -> None:
    parsed = wire.parse({"messages": [{"role": "assistant", "content": content}]}).messages
    assert parsed == wire.parse({"messages": [{"role": "assistant"}]}).messages == (Message(Role.ASSISTANT),)


def test_anthropic_forms_of_one_conversation() -> None:
    plain = {"system": "Help.", "messages": [{"role": "user", "content": "hello"}]}
    marked = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_is_subagent=true"},
            {"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {
                "content": [{"cache_control": {"type": "ephemeral"}, "text": "hello", "type": "text"}],
                "role": "user",
            }
        ],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "context_management": {"edits": []},
        "betas": ["x"],
    }
    wire = Anthropic()
    expected = (Message(Role.SYSTEM, "Help."), HELLO)
    assert wire.parse(plain).messages == wire.parse(marked).messages == expected


def test_anthropic_results_come_before_what_the_user_says_and_in_the_order_of_the_calls() -> None:
    body = {
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "1", "name": "a", "input": {"x": 1}},
                    {"type": "tool_use", "id": "2", "name": "b"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
                    {"type": "tool_result", "tool_use_id": "1", "is_error": True},
                    {"type": "text", "text": "go on"},
                    {"type": "image", "source": {}},
                ],
            },
            {"role": "system", "content": "a notice"},
        ]
    }
    messages = Anthropic().parse(body).messages
    calls = (ToolUse("1", "a", '{"x": 1}'), ToolUse("2", "b", "{}"))
    assert messages == (
        Message(Role.ASSISTANT, "", calls=calls, reasoning="hm"),
        Message(Role.TOOL, "", call_id="1"),
        Message(Role.TOOL, "two", call_id="2"),
        Message(Role.USER, "go on\n[image omitted: this model reads text only]"),
        Message(Role.SYSTEM, "a notice"),
    )


def test_both_shapes_of_a_tool_are_one() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    reordered = {"properties": {"x": {"type": "string"}}, "type": "object"}
    hello = [{"role": "user", "content": "hello"}]
    openai = OpenAIChat().parse(
        {"messages": hello, "tools": [{"type": "function", "function": {"name": "t", "parameters": schema}}]}
    )
    anthropic = Anthropic().parse({"messages": hello, "tools": [{"name": "t", "input_schema": reordered}]})
    assert openai.tools_key == anthropic.tools_key


@pytest.mark.parametrize(
    ("wire", "body", "place"),
    [
        (OpenAIChat(), {"messages": [{"role": "user"}, {"role": "x"}]}, r"messages\[1\]\.role"),
        (
            OpenAIChat(),
            {"messages": [{"role": "user", "content": [{"type": "text"}, 3]}]},
            r"messages\[0\]\.content\[1\]",
        ),
        (
            Anthropic(),
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            r"messages\[0\]\.content\[0\]\.type",
        ),
        (
            Anthropic(),
            {"messages": [{"role": "user"}], "tools": [{"type": "web_search_20250305"}]},
            r"tools: web_search_20250305: defined by a provider",
        ),
        (Anthropic(), {"messages": [{"role": "user"}], "system": 5}, "system: expected a list"),
    ],
)
def test_a_refusal_names_the_place(wire: OpenAIChat | Anthropic, body: dict, place: str) -> None:
    with pytest.raises(Refusal, match=place) as refused:
        wire.parse(body)
    assert refused.value.reason is Reason.INVALID


def test_arguments_that_are_no_object_reach_an_anthropic_harness_as_text() -> None:
    message = Message(Role.ASSISTANT, " ", calls=(ToolUse("1", "t", "[1"),), reasoning="because")
    reply = Reply("r", message, Finish.LENGTH, 7, 3)
    body = Anthropic().reply(reply, ChatRequest((HELLO,)))
    thinking, call = body["content"]
    assert thinking["signature"]
    assert call["input"] == {"arguments": "[1"}
    assert body["stop_reason"] == "max_tokens"
    events = b"".join(Anthropic().events(reply, ChatRequest((HELLO,)))).decode()
    assert '"partial_json":"[1"' in events
    assert "signature_delta" in events
    chat = OpenAIChat().reply(reply, ChatRequest((HELLO,)))
    assert chat["choices"][0]["message"]["content"] is None
    assert chat["choices"][0]["message"]["reasoning_content"] == "because"
    assert json.dumps(chat)


def responses(*items: dict, **fields: object) -> tuple[Message, ...]:
    """The messages of a Responses request."""
    return OpenAIResponses().parse({"input": list(items), **fields}).messages


def said(text: str) -> dict:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict:
    return {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": "x",
    }


def called(call_id: str, **fields: str) -> dict:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **fields}


def gave(call_id: str, output: object) -> dict:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}], "id": "m"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "text", "text": "hello"}],
            "unknown_beta": 1,
        },
    ],
)
def test_responses_forms_of_one_message(item: dict) -> None:
    assert responses(item) == OpenAIResponses().parse({"input": "hello"}).messages == (HELLO,)


def test_what_another_agent_says_is_a_user_message() -> None:
    content = [{"type": "input_text", "text": "hello"}, {"type": "encrypted_content", "data": "x"}]
    (message,) = responses({"type": "agent_message", "author": "/a", "recipient": "/b", "content": content})
    assert message == Message(Role.USER, "hello\n[encrypted text omitted: this model reads text only]")


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        thought("hm"),
        said("look"),
        called("1"),
        called("2", namespace="n"),
        {"type": "custom_tool_call", "call_id": "3", "name": "c", "input": "é"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "three"},
        gave("2", [{"type": "input_text", "text": "two"}, {"type": "input_image", "image_url": "x"}]),
        gave("1", None),
        said("done"),
    ]
    calls = (ToolUse("1", "f", "{}"), ToolUse("2", "n__f", "{}"), ToolUse("3", "c", '{"input": "é"}'))
    assert responses(*items, instructions="Help.") == (
        Message(Role.SYSTEM, "Help."),
        Message(Role.SYSTEM, "Be brief."),
        HELLO,
        Message(Role.ASSISTANT, "look", calls=calls, reasoning="hm"),
        Message(Role.TOOL, "", call_id="1"),
        Message(Role.TOOL, "two\n[image omitted: this model reads text only]", call_id="2"),
        Message(Role.TOOL, "three", call_id="3"),
        Message(Role.ASSISTANT, "done"),
    )


def test_text_moved_behind_its_call_stays_in_the_turn() -> None:
    one = Message(Role.ASSISTANT, "look", calls=(ToolUse("1", "f", "{}"),))
    assert responses(said("look"), called("1")) == responses(called("1"), said("look")) == (one,)


def test_turns_side_by_side_stay_apart() -> None:
    first, second = Message(Role.ASSISTANT, "one"), Message(Role.ASSISTANT, "two")
    assert responses(said("one"), said("two")) == (first, second)
    assert responses(said("one"), thought("hm"), said("two")) == (
        first,
        Message(Role.ASSISTANT, "two", reasoning="hm"),
    )


def test_tools_that_are_no_functions() -> None:
    body = {
        "input": "hello",
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {
                "type": "namespace",
                "name": "n",
                "description": "All of n.",
                "tools": [{"type": "function", "name": "g", "description": "G."}, {"type": "mcp"}],
            },
            {"type": "custom", "name": "c", "format": {"syntax": "lark", "definition": "start: x"}},
            {"type": "web_search"},
        ],
    }
    request = OpenAIResponses().parse(body)
    assert [tool.name for tool in request.tools] == ["f", "n__g", "c"]
    assert request.tools[1].description == "All of n.\nG."
    assert "start: x" in request.tools[2].description
    assert request.wishes == {"withheld_tools": ["mcp", "web_search"]}
    calls = (
        ToolUse("1", "n__g", "{}"),
        ToolUse("2", "c", '{"input": "x"}'),
        ToolUse("3", "c", "[broken"),
        ToolUse("4", "unknown", ""),
    )
    reply = Reply("r", Message(Role.ASSISTANT, "", calls=calls), Finish.STOP, 7, 3)
    output = OpenAIResponses().reply(reply, request)["output"]
    assert [(item["type"], item["name"], item.get("namespace")) for item in output] == [
        ("function_call", "g", "n"),
        ("custom_tool_call", "c", None),
        ("custom_tool_call", "c", None),
        ("function_call", "unknown", None),
    ]
    assert [item.get("input", item.get("arguments")) for item in output] == ["{}", "x", "[broken", ""]
    again = responses(*output)
    assert [call.name for call in again[0].calls] == ["n__g", "c", "c", "unknown"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "input: at least one item"),
        ({"input": []}, "input: at least one item"),
        ({"input": [{"type": "message", "role": "root"}]}, r"input\[0\]\.role"),
        ({"input": [said("x"), {"type": "exploit"}]}, r"input\[1\]\.type: 'exploit'"),
        ({"input": [gave("1", [{"type": "video"}])]}, r"input\[0\]\.output\[0\]\.type"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id: nothing is stored"),
        ({"input": "x", "conversation": {"id": "c"}}, "conversation: nothing is stored"),
        ({"input": "x", "background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, r"input\[0\]\.id: 'i' is not known"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools: web_search: defined by a provider"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": 5}]}, r"tools\[0\]\.tools"),
    ],
)
def test_a_responses_refusal_names_the_place(body: dict, place: str) -> None:
    with pytest.raises(Refusal, match=place):
        OpenAIResponses().parse(body)


def test_blocks_of_a_providers_tools_are_told_of() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
    ]
    omitted = "[{} omitted: this model reads text only]"
    expected = "\n".join(["a", omitted.format("server_tool_use"), omitted.format("web_search_tool_result")])
    parsed = Anthropic().parse({"messages": [{"role": "assistant", "content": content}]}).messages
    assert parsed == (Message(Role.ASSISTANT, expected),)
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hello"}}
    assert Anthropic().parse({"messages": [{"role": "user", "content": [document]}]}).messages == (HELLO,)


def test_functions_as_they_were_before_tools() -> None:
    body = {
        "messages": [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "x"},
        ]
    }
    assert OpenAIChat().parse(body).messages == (
        Message(Role.ASSISTANT, "", calls=(ToolUse("f", "f", "{}"),)),
        Message(Role.TOOL, "x", call_id="f"),
    )


def test_what_is_the_default_is_no_wish() -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert OpenAIChat().parse({"messages": hello, "tool_choice": "auto", "top_p": None}).wishes == {}
    assert Anthropic().parse({"messages": hello, "tool_choice": {"type": "auto"}}).wishes == {}
    assert Anthropic().parse({"messages": hello, "tool_choice": {"type": "any"}}).wishes == {
        "tool_choice": {"type": "any"}
    }


def test_the_table_of_errors_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wires.md").read_text()
    table = page[page.index("| reason |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    expected = []
    for reason in Reason:
        refusal = Refusal(reason, "x")
        chat = OpenAIChat().error(refusal)["error"]
        assert OpenAIResponses().error(refusal)["error"] == chat
        kind = Anthropic().error(refusal)["error"]["type"]
        expected.append([reason.value[0], str(reason.status), kind, chat["type"], chat["code"] or ""])
    assert rows == expected
    for bound in (
        f"{listener.CONNECTIONS} connections",
        f"{listener.HEAD_BYTES >> 10} KiB and {app.HEADER_LIMIT} headers",
        f"{listener.HEAD_TIMEOUT_S:g} s for the head and {app.BODY_TIMEOUT_S:g} s for the body",
        f"{app.BODY_LIMIT >> 20} MiB of body",
        f"{session.FLIGHTS} requests in flight",
        f"every {app.HEARTBEAT_S:g} seconds",
    ):
        assert bound in " ".join(page.split())
