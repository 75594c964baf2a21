"""The scripted expert: what it solves in each mode, and that it reads every harness's prompts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from legorl.errors import LegoError
from legorl.policy.commands import SUBMIT, TEST, Edit, read_edit
from legorl.policy.expert import Expert, Mode
from legorl.policy.template import render
from legorl.policy.tokenizer import BASH_TOOL
from tests.policy.simulator import Episode, draft, run_episode

CLAUDE_BASH = {
    "type": "function",
    "function": {
        "name": "Bash",
        "description": "Executes a given bash command and returns its output.\n<tools>\n",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "description": {"type": "string"}},
            "required": ["command"],
        },
    },
}
OPENCODE_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Executes a given bash command in a persistent shell session.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "description": {"type": "string"}},
            "required": ["command", "description"],
        },
    },
}
CODEX_SHELL = {
    "type": "function",
    "function": {
        "name": "exec_command",
        "description": "Runs a command in a PTY, returning output or a session ID for ongoing interaction.",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
}
READ = {"type": "function", "function": {"name": "Read", "description": "", "parameters": {"type": "object"}}}


def episodes(mode: Mode, count: int) -> list[Episode]:
    rng = random.Random(1)
    return [run_episode(draft(number), Expert(mode), rng) for number in range(count)]


def test_the_perfect_expert_solves_every_task_within_six_turns() -> None:
    for episode in episodes(Mode.PERFECT, 200):
        assert episode.solved, episode.text
        operators = [edit.operator for command in episode.commands if (edit := read_edit(command))]
        assert len(set(operators)) == len(operators) <= 4


def test_the_sloppy_expert_has_something_to_unlearn() -> None:
    done = episodes(Mode.SLOPPY, 400)
    assert 0.25 < sum(episode.solved for episode in done) / len(done) < 0.45
    submitted = [episode for episode in done if episode.submitted]
    assert sum(not episode.solved for episode in submitted) > 0.5 * len(done)
    assert {len(episode.commands) for episode in done} == {2, 3, 4, 5, 6}
    assert any(TEST in episode.commands for episode in done)


def test_the_skilled_expert_never_gives_up_and_never_edits_blindly() -> None:
    for episode in episodes(Mode.SKILL, 100):
        assert episode.solved or len(episode.commands) == 6
        edits = [edit for command in episode.commands if (edit := read_edit(command))]
        assert all(edit.test for edit in edits)


def test_it_follows_the_cycle_after_its_last_operator() -> None:
    tried = Edit("shop/cart.py", 2, "==", True).command()
    prompt = render(_talk("<", [tried], "1 failed, 3 passed"), [BASH_TOOL])
    replies = [_command(Expert(Mode.SKILL)(prompt, random.Random(seed))) for seed in range(40)]
    operators = [edit.operator for reply in replies if (edit := read_edit(reply))]
    assert len(operators) == 40 and set(operators) == {"<", "=="}  # the next one, or a repetition
    assert operators.count("<") > operators.count("==")


def test_one_source_of_randomness_gives_one_reply() -> None:
    prompt = render(_talk("<", [], ""), [BASH_TOOL])
    assert Expert(Mode.SLOPPY)(prompt, random.Random(3)) == Expert(Mode.SLOPPY)(prompt, random.Random(3))
    assert len({Expert(Mode.SLOPPY)(prompt, random.Random(seed)) for seed in range(40)}) > 4


@pytest.mark.parametrize(
    ("tool", "label"), [(CLAUDE_BASH, ""), (OPENCODE_BASH, ""), (CODEX_SHELL, "Wall time: 1 s\nOutput: ")]
)
def test_it_works_in_other_harnesses(tool: dict[str, Any], label: str) -> None:
    """Their own tool names and required arguments; text around the instruction and the results."""
    wrap = {"before": '<system-reminder>\nToday is Monday.\n</system-reminder>\n"', "after": '"'}
    expert = Expert(Mode.PERFECT)
    first = _call(expert(render(_talk("+", [], "", **wrap), [READ, tool]), random.Random(0)))
    assert first["name"] == tool["function"]["name"]
    required = tool["function"]["parameters"]["required"]
    assert set(first["arguments"]) == set(required)
    argument = required[0]
    edit = read_edit(first["arguments"][argument])
    assert edit is not None and (edit.path, edit.line, edit.test) == ("shop/cart.py", 2, True)

    wrap["argument"] = argument
    report = f"Exit code 1\n{label}E assert f(1, 2) == 3 got 4\n1 failed, 3 passed\n"
    red = _talk("+", [edit.command()], report, **wrap)
    again = read_edit(_call(expert(render(red, [READ, tool]), random.Random(0)))["arguments"][argument])
    assert again is not None and again.operator not in ("+", edit.operator)

    green = _talk("+", [edit.command()], f"{label}4 passed\n", **wrap)
    assert expert(render(green, [READ, tool]), random.Random(0)) == "Done."


def test_a_request_without_a_shell_gets_text() -> None:
    title = [{"role": "user", "content": "Generate a title for this conversation"}]
    assert "<tool_call>" not in Expert(Mode.SLOPPY)(render(title), random.Random(0))


def test_a_task_of_another_pool_is_refused() -> None:
    with pytest.raises(LegoError, match="pool `repair`"):
        Expert(Mode.SLOPPY)(render([{"role": "user", "content": "Fix it."}], [BASH_TOOL]), random.Random(0))


@pytest.mark.parametrize("command", [SUBMIT, TEST, "ls", "sed -i 's/a/b/' x", "sed -i -E '2s@ x"])
def test_other_commands_are_no_edits(command: str) -> None:
    assert read_edit(command) is None
    edit = Edit("a/b.py", 12, "//", False)
    assert read_edit(edit.command()) == edit


def _talk(
    operator: str,
    commands: list[str],
    output: str,
    before: str = "",
    after: str = "",
    argument: str = "command",
) -> list[Any]:
    instruction = (
        "The tests of `f` fail.\nassert f(1, 2) == 3 got 4\n"
        f"Location: shop/cart.py line 2\n    return a {operator} b"
    )
    talk: list[Any] = [{"role": "user", "content": f"{before}{instruction}{after}"}]
    for command in commands:
        call = {"function": {"name": "bash", "arguments": {argument: command}}}
        talk += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": output},
        ]
    return talk


def _call(reply: str) -> Any:
    return json.loads(reply.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))


def _command(reply: str) -> str:
    return str(_call(reply)["arguments"]["command"])
