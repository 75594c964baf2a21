"""What means the same gives the same messages, on both wires."""

from __future__ import annotations

import json

import pytest

from legorl.engine.base import Finish
from legorl.proxy.messages import ChatRequest, Message, Reply, Role, ToolUse
from legorl.proxy.refusal import Reason, Refusal
from legorl.proxy.wire_anthropic import Anthropic
from legorl.proxy.wire_openai_chat import OpenAIChat

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
