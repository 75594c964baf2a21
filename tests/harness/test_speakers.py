"""Who speaks in every recorded request, and in requests like those that were not recorded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.harness.base import Speaker, ThreadKind
from legorl.harness.registry import HARNESSES
from legorl.harness.speakers import RULES, detect, generic
from tests.captures import CAPTURES, headers_of, load_capture

HARNESS_OF = {
    "claude": "claude_code",
    "claude197": "claude_code",
    "codex": "codex",
    "mini": "mini_swe_agent",
    "oh": "openhands",
    "opencode": "opencode",
    "qwen": "qwen_code",
}
SUBAGENTS = {path: "A" if "cxsub" in path.name else "ABC" for path in CAPTURES if "sub" in path.name}
"""The tasks that subagents were given, one each."""


def kind_of(speaker: Speaker) -> str:
    """In the words of the recordings."""
    if speaker.kind is ThreadKind.SIDE:
        return "compaction" if speaker.label == "compaction" else "side"
    return {ThreadKind.MAIN: "main", ThreadKind.SUBAGENT: "sub"}[speaker.kind]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.name.split(".jsonl")[0])
def test_every_recorded_request(path: Path) -> None:
    expected = HARNESS_OF[path.name.split("-")[0]]
    for record in load_capture(path):
        headers = headers_of(record)
        assert detect(headers, record["body"]) == expected
        speaker = RULES[expected](headers, record["body"])
        assert kind_of(speaker) == record["kind"], record["n"]
        assert (speaker.parent is None) == (speaker.kind is ThreadKind.MAIN)


@pytest.mark.parametrize("path", SUBAGENTS, ids=lambda path: path.name)
def test_concurrent_subagents_are_threads_of_their_own(path: Path) -> None:
    rule = RULES[HARNESS_OF[path.name.split("-")[0]]]
    tasks = defaultdict(set)
    for record in load_capture(path):
        if record["kind"] == "sub":
            text = json.dumps(record["body"])
            (task,) = [name for name in SUBAGENTS[path] if f"SUBTASK-MARK {name}" in text]
            tasks[rule(headers_of(record), record["body"]).key].add(task)
    assert sorted(name for names in tasks.values() for name in names) == list(SUBAGENTS[path])


TOOLS = [{"name": "t"}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(system: str, *texts: str, tools: bool = True) -> dict[str, Any]:
    """A chat request."""
    messages = [{"role": "system", "content": system}, *map(user, texts)]
    return {"messages": messages, "tools": TOOLS if tools else []}


UNRECORDED: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "claude: a nested subagent": (
        "claude_code",
        {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
        said("s", "task"),
        "subagent:b < subagent:a",
    ),
    "claude: a subagent without its header": (
        "claude_code",
        {},
        {
            "system": [{"type": "text", "text": "x-anthropic-billing-header: v; cc_is_subagent=true;"}],
            "messages": [user("task")],
            "tools": TOOLS,
        },
        "subagent:* < main",
    ),
    "claude: a subagent's summary": (
        "claude_code",
        {"x-claude-code-agent-id": "a"},
        said("s", "task", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."),
        "side:compaction:a < subagent:a",
    ),
    "claude: a summary asked for before a system message": (
        "claude_code",
        {},
        {
            "messages": [
                user("Your task is to create a detailed summary of the conversation so far"),
                {"role": "system", "content": "tools"},
            ],
            "tools": TOOLS,
        },
        "side:compaction < main",
    ),
    "claude: a page to read": (
        "claude_code",
        {},
        said("", "Web page content:", tools=False),
        "side:other < main",
    ),
    "opencode: a title over Anthropic's wire, first of all": (
        "opencode",
        {"x-session-id": "s"},
        {"system": [{"type": "text", "text": "You are a title generator."}], "messages": [user("Fix.")]},
        "side:title < main",
    ),
    "opencode: a summary over Responses": (
        "opencode",
        {"x-session-id": "s"},
        {
            "input": [
                {"role": "developer", "content": "You are a context summarization agent."},
                {"role": "user", "content": [{"type": "input_text", "text": "Here it is, by title"}]},
            ]
        },
        "side:compaction < main",
    ),
    "opencode: a subagent's summary": (
        "opencode",
        {"x-session-id": "s2", "x-parent-session-id": "s"},
        said("You are a context summarization agent.", "so far", tools=False),
        "side:compaction:s2 < subagent:s2",
    ),
    "openhands: a title": (
        "openhands",
        {"x-litellm-session-id": "s"},
        {**said("You generate concise, descriptive titles", "Fix.", tools=False), "prompt_cache_key": "s"},
        "side:title < main",
    ),
    "openhands: tools described in words": (
        "openhands",
        {"x-litellm-session-id": "s"},
        {**said("You are OpenHands agent.\n<function=name>", "Fix.", tools=False), "prompt_cache_key": "s"},
        "main",
    ),
    "codex: a subagent": (
        "codex",
        {
            "session-id": "s",
            "thread-id": "t",
            "x-codex-parent-thread-id": "s",
            "x-openai-subagent": "collab_spawn",
        },
        {"input": [user("task")], "tools": TOOLS},
        "subagent:t < main",
    ),
    "codex: a subagent's subagent": (
        "codex",
        {"session-id": "s", "thread-id": "u", "x-codex-parent-thread-id": "t"},
        {"input": [user("task")], "tools": TOOLS},
        "subagent:u < subagent:t",
    ),
    "codex: a summary": (
        "codex",
        {"session-id": "s", "thread-id": "s"},
        {"input": [user("Fix."), user("You are performing a CONTEXT CHECKPOINT COMPACTION.")]},
        "side:compaction < main",
    ),
    "codex: a summary by its own header": (
        "codex",
        {"session-id": "s", "thread-id": "s", "x-openai-subagent": "compact"},
        {"input": "text"},
        "side:compaction < main",
    ),
    "qwen: a summary at the end of the history": (
        "qwen_code",
        {},
        said("You are Qwen Code", "Fix.", "You are the component that summarizes a conversation when"),
        "side:compaction < main",
    ),
    "qwen: a summary by a system prompt": (
        "qwen_code",
        {},
        said("You are the component that summarizes a conversation when", "history", tools=False),
        "side:compaction < main",
    ),
    "qwen: what to remember": (
        "qwen_code",
        {},
        said("You are now acting as the managed memory extraction subagent for", "history"),
        "side:memory < main",
    ),
    "qwen: a fork of the main thread": (
        "qwen_code",
        {},
        said(
            "You are a forked worker.\n - You operate in non-interactive mode: do not ask the user questions",
            "x",
        ),
        "subagent:* < main",
    ),
    "mini: text mode": (
        "mini_swe_agent",
        {},
        said("You are a helpful assistant", "Fix.", tools=False),
        "main",
    ),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_requests_that_were_not_recorded(name: str) -> None:
    harness, headers, body, expected = UNRECORDED[name]
    speaker = RULES[harness](headers, body)
    thread = speaker.kind.value if speaker.key == "main" else f"{speaker.kind.value}:{speaker.key}"
    expected_thread, _, parent = expected.partition(" < ")
    assert speaker.parent == (parent or None)
    assert thread.startswith(expected_thread.removesuffix("*"))
    assert speaker.kind is not ThreadKind.SIDE or speaker.label in thread


def test_a_subagent_without_a_header_keeps_its_key_as_it_goes_on() -> None:
    system = "An agent.\n - You operate in non-interactive mode: do not ask the user questions; proceed"
    one, two = said(system, "reminder", "task one"), said(system, "reminder", "task two")
    later = {**one, "messages": [*one["messages"], {"role": "assistant", "content": "x"}, user("more")]}
    keys = [RULES["qwen_code"]({}, body).key for body in (one, two, later)]
    assert keys[0] == keys[2] != keys[1]


def test_a_program_that_is_not_known() -> None:
    assert detect({"user-agent": "curl/8"}, said("You help.", "x")) is None
    assert generic({}, said("You help.", "x")).kind is ThreadKind.MAIN
    assert generic({}, said("You help.", "x", tools=False)).kind is ThreadKind.MAIN
    assert generic({}, said("You write titles.", "x", tools=False)).label == "title"
    assert generic({}, said("You help.", "Summarize this.", tools=False)).label == "compaction"
    assert generic({}, said("You are a subagent.", "x")).kind is ThreadKind.SUBAGENT
    output = "<returncode>1</returncode>\n<output>\n" + "F" * 60 + "\nshort test summary info: title, memory"
    assert generic({}, said("You help.", "Fix.", output, tools=False)).kind is ThreadKind.MAIN


def test_every_harness_has_a_rule() -> None:
    assert set(HARNESSES) <= set(RULES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    body=st.fixed_dictionaries(
        {}, optional={name: JSON for name in ("messages", "input", "system", "instructions", "tools")}
    ),
    metadata=st.text(max_size=5) | st.just("[1]") | st.just('{"request_kind": 5}'),
)
def test_no_body_breaks_a_rule(body: dict[str, Any], metadata: str) -> None:
    headers = {"x-codex-turn-metadata": metadata}
    for rule in (*RULES.values(), generic):
        assert rule(headers, body).key
    detect(headers, body)
