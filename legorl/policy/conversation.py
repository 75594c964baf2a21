"""Reads a repair conversation back out of ChatML text, whichever harness wrote it.

Invariant: everything the scripted expert knows is in the text of the prompt; it holds no state between calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from legorl.errors import LegoError
from legorl.policy.commands import CLASS, TEST, Edit, read_edit
from legorl.policy.template import CALL_END, CALL_START, TURN_END, TURN_START
from legorl.policy.tokenizer import BASH_TOOL
from legorl.tasks.mutate import FAMILIES

_TURN = re.compile(re.escape(TURN_START) + r"(\w+)\n(.*?)" + re.escape(TURN_END), re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_CALL = re.compile(re.escape(CALL_START) + r"\n(.*?)\n" + re.escape(CALL_END), re.DOTALL)
_LOCATION = re.compile(r"Location: (\S+) line (\d+)\n([^\n]*)")
_OPERATOR = re.compile(f" ({CLASS}) ")
_GREEN = re.compile(r"(?m)^\s*(?:Output: )?\d+ passed\s*$")
_RED = re.compile(r"(?m)^\s*(?:Output: )?\d+ failed")
"""Some harnesses put a word before what the command printed."""
_RESPONSE = "<tool_response>\n"


SHELLS = {"bash": "command", "terminal": "command", "exec_command": "cmd", "run_shell_command": "command"}
"""The harnesses' shell tools by their name in lower case, and the argument that takes the command."""


@dataclass(frozen=True)
class BashTool:
    """The harness's shell tool: its name, whether a call must be described, and how work is submitted."""

    name: str
    argument: str
    """Takes the command."""
    needs_description: bool
    submits_by_command: bool
    """mini-swe-agent ends on a command; the others end on a reply without a call."""


@dataclass(frozen=True)
class Conversation:
    """What the expert sees of a task and of its own work so far."""

    tool: BashTool
    path: str
    line: int
    operator: str
    """The operator on the defective line as given."""
    tried: tuple[str, ...]
    """Operators put there so far, in order."""
    reds: int
    """Red test runs so far."""
    turns: int
    """Replies so far."""
    green: bool | None
    """Of the present code: tests passed, failed, or None when not tested."""

    @property
    def family(self) -> tuple[str, ...]:
        """The operators that may be right, in their fixed order."""
        for family in FAMILIES.values():
            if self.operator in family:
                return family
        raise LegoError(f"The operator {self.operator!r} in {self.path} is of no known family.")


def read_conversation(prompt: str) -> Conversation | None:
    """The repair conversation in `prompt`; None when it offers no shell (a title or summary request).

    Raises:
        LegoError: there is a shell, but no task of the `repair` kind.
    """
    tool = _bash_tool(prompt)
    if tool is None:
        return None
    turns = _TURN.findall(prompt)
    location = next(
        (
            found
            for role, text in turns
            if role == "user" and not text.startswith(_RESPONSE) and (found := _LOCATION.search(text))
        ),
        None,
    )
    operator = _OPERATOR.search(location[3]) if location else None
    if location is None or operator is None:
        raise LegoError(
            "The scripted expert found no `Location: <path> line <n>` with an operator below it in the "
            "prompt; it can only solve tasks of the pool `repair`."
        )
    path, line = location[1], int(location[2])
    tried: list[str] = []
    reds = replies = 0
    green: bool | None = None
    for role, text in turns:
        if role == "assistant":
            replies += 1
            edit = _last_edit(text, tool.argument)
            if edit is not None and (edit.path, edit.line) == (path, line):
                tried.append(edit.operator)
                green = None
        elif role == "user" and text.startswith(_RESPONSE):
            if _RED.search(text):
                green = False
                reds += 1
            elif _GREEN.search(text):
                green = True
    return Conversation(tool, path, line, operator[1], tuple(tried), reds, replies, green)


def write_call(tool: BashTool, command: str) -> str:
    """The reply that runs `command`."""
    arguments = {tool.argument: command}
    if tool.needs_description:
        arguments["description"] = "Run the tests" if command == TEST else "Edit the operator"
    call = json.dumps({"name": tool.name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_START}\n{call}\n{CALL_END}"


def _bash_tool(prompt: str) -> BashTool | None:
    listed = _TOOLS.search(prompt)
    for line in listed[1].split("\n") if listed else []:
        tool = json.loads(line)
        function: Mapping[str, Any] = tool.get("function", tool)
        if argument := SHELLS.get(function["name"].lower()):
            schema = function.get("parameters") or function.get("input_schema") or {}
            return BashTool(
                name=function["name"],
                argument=argument,
                needs_description="description" in schema.get("required", ()),
                submits_by_command=function.get("description") == BASH_TOOL["function"]["description"],
            )
    return None


def _last_edit(reply: str, argument: str) -> Edit | None:
    edits = []
    for text in _CALL.findall(reply):
        try:
            command = json.loads(text)["arguments"][argument]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # not a call of ours
        edits.append(read_edit(command) if isinstance(command, str) else None)
    return next((edit for edit in reversed(edits) if edit), None)
