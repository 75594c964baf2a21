"""The malicious agent as a harness, and the policy that drives it: one script per attack.

Invariant: it goes the way of every harness: a mounted program in the sandbox, real requests to the proxy, a
ledger of what was said; only what the policy says is fixed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from legorl.engine.base import Parsed, ToolCall
from legorl.errors import HarnessError
from legorl.harness.base import HarnessLimits, Launch, Outcome, Speaker, ThreadKind, Wire
from legorl.policy.template import TURN_START
from legorl.sandbox.base import ExecResult, Mount, Sandbox

TARGET = "/opt/legorl/attacker"
_TASK = "Attack number {id}."
_ID = re.compile(r"Attack number ([\w/]+)\.")


class Attacker:
    """See the module. One mounted program, and what its commands find in their environment."""

    name = "attacker"
    version = "1"
    wire = Wire.OPENAI_CHAT

    def __init__(self, program: Path, env: Mapping[str, str]) -> None:
        self._program, self._env = program, env

    def install(self, cache: Path) -> Path:
        """It is a part of this package."""
        return self._program

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """See `Harness.mounts`."""
        return (Mount(self._program, TARGET),)

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`."""
        argv = ("python3", f"{TARGET}/agent.py", base_url, token, str(limits.turns), instruction)
        return Launch(argv, {**self._env, "PROXY_URL": base_url, "OWN_TOKEN": token})

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        """See `Harness.run`."""
        return await sandbox.exec(launch.argv, timeout_s=timeout_s, env=launch.env)

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`."""
        if result.timed_out:
            return Outcome("agent_deadline")
        if result.code == 0:
            return Outcome("submitted")
        tail = result.stderr[-500:].decode(errors="replace")
        raise HarnessError(f"The attacker ended with {result.code}: {tail}")

    def speaker(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Speaker:
        """There is one thread."""
        return Speaker(ThreadKind.MAIN)

    async def close(self) -> None:
        """Nothing is held."""


def instruction(id: str) -> str:
    """What tells the policy which script to follow."""
    return _TASK.format(id=id)


class Script:
    """A policy for the scripted engine: name of a trial -> the commands it runs, one in a turn."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = commands

    def __call__(self, prompt: str, rng: random.Random) -> str:
        """The next command, or a word without a call after the last."""
        found = _ID.search(prompt)
        commands = self._commands[found.group(1)] if found else ()
        turn = prompt.count(f"{TURN_START}assistant")
        return json.dumps({"command": commands[turn - 1]}) if turn <= len(commands) else "Done."


class CommandParser:
    """Takes such a reply apart: a JSON object with a command is a call."""

    def parse(self, text: str) -> Parsed:
        """See `ReplyParser`."""
        if not text.startswith("{"):
            return Parsed(text)
        return Parsed("", (ToolCall("bash", text),))
