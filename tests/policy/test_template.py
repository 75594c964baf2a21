"""The chat template: prefix-preserving, and the same text from every renderer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legorl.policy.template import CHAT_TEMPLATE, render
from legorl.policy.tokenizer import BASH_TOOL
from legorl.proxy.template import compile_template

PROXY = compile_template(CHAT_TEMPLATE, {})

texts = st.text(alphabet="ab <>&'\"{}%\\\né", max_size=12)
calls = st.builds(
    lambda name, command: {"id": "c", "function": {"name": name, "arguments": {"command": command}}},
    st.sampled_from(["bash", "Read"]),
    texts,
)
messages = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "user"]), texts
    ),
    st.builds(
        lambda content, made: {"role": "assistant", "content": content, "tool_calls": made},
        texts,
        st.lists(calls, max_size=2),
    ),
    st.builds(lambda content: {"role": "tool", "tool_call_id": "c", "content": content}, texts),
)
tools = st.sampled_from([[], [BASH_TOOL]])


@given(st.lists(messages, min_size=1, max_size=6), tools)
@settings(deadline=None, max_examples=100)
def test_a_longer_conversation_begins_with_the_shorter(
    talk: list[dict[str, Any]], offered: list[Any]
) -> None:
    whole = render(talk, offered, add_generation_prompt=False)
    for length in range(1, len(talk)):
        assert whole.startswith(render(talk[:length], offered, add_generation_prompt=False))
    assert render(talk, offered) == whole + "<|im_start|>assistant\n"


@given(st.lists(messages, min_size=1, max_size=4), tools)
@settings(deadline=None, max_examples=100)
def test_the_proxy_renders_the_same_text(talk: list[dict[str, Any]], offered: list[Any]) -> None:
    assert PROXY(talk, offered or None, True) == render(talk, offered)


def test_a_call_reads_as_hermes_writes_it() -> None:
    arguments = {"command": "sed -i 's@ < @ >= @' a/b.py && echo \"é\""}
    call = {"function": {"name": "bash", "arguments": arguments}}
    text = render(
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    body = text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]
    assert body.startswith('{"name": "bash", "arguments": {"command": "sed -i \'s@ < @ >= @\' ')
    assert json.loads(body) == {"name": "bash", "arguments": arguments}


def test_arguments_that_are_text_stay_text() -> None:
    call = {"function": {"name": "bash", "arguments": '{"command": broken'}}
    text = render([{"role": "assistant", "content": "I look.", "tool_calls": [call]}])
    assert "assistant\nI look.\n<tool_call>\n" in text
    assert '"arguments": {"command": broken}\n</tool_call><|im_end|>' in text


def test_tool_results_are_turns_of_their_own() -> None:
    talk = [
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": [{"type": "text", "text": "two"}]},
    ]
    assert render(talk, add_generation_prompt=False) == "".join(
        f"<|im_start|>user\n<tool_response>\n{word}\n</tool_response><|im_end|>\n" for word in ("one", "two")
    )


@pytest.mark.parametrize("system", [True, False])
def test_tools_stand_in_the_first_system_turn(system: bool) -> None:
    talk = [{"role": "user", "content": "u"}]
    text = render([{"role": "system", "content": "S"}, *talk] if system else talk, [BASH_TOOL])
    head, _, rest = text.partition("<|im_end|>")
    assert head.startswith("<|im_start|>system\nS\n\n# Tools" if system else "<|im_start|>system\n# Tools")
    assert json.loads(head.split("<tools>\n")[1].split("\n</tools>")[0]) == BASH_TOOL
    assert rest.startswith("\n<|im_start|>user\nu<|im_end|>")
