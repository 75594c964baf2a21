"""What the scripted policy must know of each harness: its tools, its oddities, how work is declared done."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.integration.live import Turn, call


@dataclass(frozen=True)
class Dialect:
    """One harness."""

    shell: str
    command: str = "command"
    """Name of the shell tool's argument."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that a call must have."""
    odd: tuple[str, ...] = ()
    """Arguments of the shell tool with odd spacing, order, escapes, numbers."""
    submit: str = ""
    """Command that submits; empty where a reply without a call does."""
    subagent: str = ""
    """Tool that starts one; empty where there is none."""
    kind: str = "general-purpose"
    """Of the subagents."""

    def run(self, command: str) -> str:
        """Run a command."""
        return call(self.shell, {self.command: command, **self.extra})

    def raw(self, arguments: str) -> str:
        """A call of the shell with these very arguments; `@` stands for the command's name."""
        return call(self.shell, arguments.replace("@", self.command))

    def delegate(self, mark: str) -> str:
        """Start a subagent."""
        task = f"SUBTASK-MARK {mark}: look at calc.py and report the bug."
        if self.subagent.endswith("spawn_agent"):
            return call(self.subagent, {"message": task})
        arguments = {"description": "explore", "prompt": task, "subagent_type": self.kind}
        return call(self.subagent, arguments)

    @property
    def done(self) -> str:
        """The last reply."""
        return self.run(self.submit) if self.submit else "Fixed `add()` in calc.py; the tests pass."


_ODD = (
    '{ "@" : "printf \'caf\\u00e9 \\u2603 \\/ \\ud83d\\ude00\\n\'" ,\n  "timeout": 5000.0%s}',
    '{"timeout":5e3,"@":"echo 1e3","extra_unknown":1.50%s}',
)


def _odd(extra: str = "") -> tuple[str, ...]:
    return tuple(text % extra for text in _ODD)


DIALECTS = {
    "mini_swe_agent": Dialect("bash", odd=_odd(), submit="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "claude_code": Dialect(
        "Bash", extra={"description": "x"}, odd=_odd(',\n"description": "y"'), subagent="Agent"
    ),
    "opencode": Dialect(
        "bash", extra={"description": "x"}, odd=_odd(', "description":"y"'), subagent="task", kind="general"
    ),
    "openhands": Dialect(
        "terminal",
        odd=(
            '{ "timeout": 5.0 ,\n  "@": "printf \'caf\\u00e9 \\u2603 \\/\\n\'", "summary": "odd"}',
            '{"@":"echo 1e3","timeout":5e0,"is_input":"false"}',
        ),
        subagent="task",
    ),
    "codex": Dialect(
        "exec_command",
        "cmd",
        odd=(
            '{ "yield_time_ms": 5000.0 ,\n  "@": "printf \'caf\\u00e9 \\u2603\\n\'"}',
            '{"@":"echo 1e3","yield_time_ms":5e3,"extra_unknown":1}',
        ),
        subagent="multi_agent_v1__spawn_agent",
    ),
    "qwen_code": Dialect(
        "run_shell_command",
        extra={"is_background": False},
        odd=_odd(', "is_background": false'),
        subagent="agent",
    ),
}
FIX = "sed -i 's/return a - b/return a + b/' calc.py && python check.py"


def basic(d: Dialect) -> list[Turn]:
    """See the test fail, repair, declare it done."""
    return ["I'll look at the repository.\n" + d.run("python check.py"), d.run(FIX), d.done]


def awkward(d: Dialect) -> list[Turn]:
    """What a policy in training says."""
    return [
        "\n\n  Leading and trailing whitespace.  \n\n" + d.raw(d.odd[0]),
        "  " + d.raw(d.odd[1]),
        "Three in parallel:\n" + d.run("sleep 1; echo one") + d.run("echo two") + d.run("echo three"),
        d.raw('{"@": "echo broken", "timeout": '),
        d.raw('{"@": "echo trunc'),
        d.run("echo between"),  # after three malformed replies in a row some give up
        call("no_such_tool", '{"a": 1.0}'),
        d.raw("{}"),
        d.run("echo between"),
        d.raw(""),
        "long output next"
        + d.run("python -c \"print('\\n'.join('line %d ' % i + 'x' * 60 for i in range(800)))\""),
        d.run("true"),
        d.run("printf 'ansi \\033[31mred\\033[0m \\r\\n tab\\there  \\n\\n\\n'; (exit 3)"),
        "text BEFORE " + d.run("echo a") + " text AFTER the call",
        d.run(FIX),
        d.done,
    ]


def delegation(name: str) -> list[Turn]:
    """One subagent, then two at once, then the repair."""
    d = DIALECTS[name]
    if name == "codex":
        return [
            "Delegating.\n" + d.delegate("A"),
            _codex_wait,
            "Two in parallel.\n" + d.delegate("B") + d.delegate("C"),
            _codex_wait,
            d.run(FIX),
            d.done,
        ]
    return [
        "Delegating.\n" + d.delegate("A"),
        "Two in parallel.\n" + d.delegate("B") + d.delegate("C"),
        d.run(FIX),
        d.done,
    ]


def reports(name: str) -> list[Turn]:
    """What every subagent does."""
    return ["Looking.\n" + DIALECTS[name].run("cat calc.py"), "The bug: add() subtracts."]


def filling(d: Dialect, lines: int, times: int) -> list[Turn]:
    """Outputs that fill the context, then the repair."""
    # Never the same call twice: that some take for a loop.
    return [*(f"Filling {n}.\n" + d.run(_lines(lines + n)) for n in range(times)), d.run(FIX), d.done]


def _lines(count: int) -> str:
    """Command that prints so many lines of some 63 characters."""
    return f"python -c \"print('\\n'.join('%d ' % i + 'x' * 60 for i in range({count})))\""


def _codex_wait(prompt: str) -> str:
    """Wait for the agents whose ids the last results named."""
    ids = re.findall(r'agent_id\\*":\s*\\*"([0-9a-f-]{36})', prompt.rpartition("<|im_start|>assistant\n")[0])
    last = prompt.rpartition("Two in parallel.")[2] if "Two in parallel." in prompt else prompt
    wanted = [name for name in dict.fromkeys(ids) if name in last]
    return call("multi_agent_v1__wait_agent", json.dumps({"targets": wanted, "timeout_ms": 20000}))
