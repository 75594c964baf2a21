"""What an agent did, read from its tool calls and their results: edits, test runs, retries.

Invariant: the same for every harness; an agent's words do not count, only its calls and what came back.
This is a metric. It never decides a reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from legorl.trial.record import Behaviour

EDIT_TOOLS = frozenset(
    {"edit", "multiedit", "multi_edit", "notebookedit", "write", "apply_patch", "patch", "file_editor"}
    | {"str_replace_editor", "str_replace_based_edit_tool"}
)
"""Names, in lower case, of tools that change files."""

VIEWING = frozenset({"view"})
"""Sub-commands of the edit tools that only read."""

_COMMAND_KEYS = ("command", "cmd", "script")
"""Argument names under which harnesses pass a shell command."""

_EDITING_COMMAND = re.compile(
    r"""(?:^|[\s;&|(])(?:
        sed\s(?:[^;&|'"]*\s)?(?:-[a-zA-Z]*i|--in-place)
      | perl\s(?:[^;&|'"]*\s)?-[a-zA-Z]*i
      | (?:tee|patch|apply_patch|mv|cp|rm|ed|truncate|touch|dd)(?=\s|$)
      | git\s+(?:apply|checkout|restore|stash|reset|revert|am)(?=\s|$)
    )""",
    re.VERBOSE,
)
_REDIRECTION = re.compile(r">{1,2}(?![>&])\s*(?!/dev/|/tmp/)[^\s>&|;]")
_PYTHON_WRITE = re.compile(
    r"""python[\d.]*\b(?=[\s\S]*(?:\.write_text\(|\.write_bytes\(|\.write\(|open\([^)]*['"][wax]b?\+?['"]))"""
)
_LABEL = re.compile(r"(?m)^Output: ")
"""What qwen-code puts before the first line that a command printed."""
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """One tool call of the agent and what came back."""

    tool: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    result: str = ""
    turn: int = 0
    """Number of the reply that the call stood in, from 1."""

    @property
    def command(self) -> str | None:
        """The shell command, None for a tool that does not run one."""
        if self.tool.lower() in EDIT_TOOLS:
            return None
        for key in _COMMAND_KEYS:
            value = self.arguments.get(key)
            if isinstance(value, str):
                return value
            if isinstance(value, list):
                return " ".join(str(part) for part in value)
        return None


def _deeds(step: Step, test_command: str) -> Iterator[str]:
    """`edit` and `test` in the order in which the call does them; neighbouring edits are one."""
    if step.tool.lower() in EDIT_TOOLS:
        if step.arguments.get("command") not in VIEWING:
            yield "edit"
        return
    command = step.command
    if command is None:
        return
    bare = _QUOTED.sub(lambda match: "'" + "_" * (len(match.group()) - 2) + "'", command)
    found = [(match.start(), "edit") for match in _EDITING_COMMAND.finditer(bare)]
    found += [(match.start(), "edit") for match in _REDIRECTION.finditer(bare)]
    found += [(match.start(), "edit") for match in _PYTHON_WRITE.finditer(command)]
    if test_command:
        found += [(match.start(), "test") for match in re.finditer(re.escape(test_command), command)]
    last = ""
    for _, deed in sorted(found):
        if deed != "edit" or last != "edit":
            yield deed
        last = deed


def behaviour(steps: Sequence[Step], *, test_command: str, pass_pattern: str, submitted: bool) -> Behaviour:
    """Sum up a trial.

    Args:
        steps: tool calls of the main thread, in order.
        test_command: what runs the visible tests; a call that contains it is a test run. Empty: unknown.
        pass_pattern: a result in which this regular expression is found is green.
        submitted: the agent ended by its own declaration.
    """
    edits = tests = retries = 0
    green = red = False
    tested_since_edit = False
    passed = re.compile(pass_pattern)
    for step in steps:
        for deed in _deeds(step, test_command):
            if deed == "edit":
                edits += 1
                retries += red
                tested_since_edit = False
            else:
                tests += 1
                green = passed.search(_LABEL.sub("", step.result)) is not None
                red = not green
                tested_since_edit = True
    return Behaviour(
        submitted=submitted,
        edits=edits,
        tests_run=tests,
        retries=retries,
        green_before_end=green,
        test_after_last_edit=tested_since_edit,
    )
