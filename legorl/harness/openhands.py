"""OpenHands SDK 1.58.2, unmodified from PyPI, on a Python 3.12 of this machine.

The SDK is a library; `inside/openhands_runner.py` is the program that holds one conversation with it. Its
bundle is installed from `openhands.lock`, every version and hash pinned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl.errors import TransferError
from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import find_python, install_lock
from legorl.harness.forked import Forked
from legorl.harness.install import Runtime
from legorl.harness.program import MODEL_NAME, broken, overflow_in
from legorl.sandbox.base import WORKDIR, ExecResult, Sandbox

_PYTHON = "3.12"
_LOCK = Path(__file__).parent / "openhands.lock"
_CONFIG = "/tmp/legorl/openhands.json"
_RESULT = "/tmp/legorl/openhands.result.json"
_STATE = "/tmp/legorl/conversations"
_INPUTRC = "/tmp/legorl/inputrc"
"""Keeps the shell of its terminal from printing marks for pasted text before every output."""
_LEAN_PROMPT = "You are a coding agent. Use the terminal to solve the task. When it is solved, say so."
_REQUEST_S = 3600
"""The trial's deadline is the real limit; the SDK's own of 300 s is too short for a slow engine."""


class OpenHands(Forked):
    """Adapter of the OpenHands SDK."""

    name = "openhands"
    version = "1.58.2"
    wire = Wire.OPENAI_CHAT
    runner = "openhands_runner"

    def runtime(self) -> Runtime:
        """See `Program.runtime`. Compiled dependencies tie it to one Python version."""
        return Runtime(
            name=self.name,
            version=self.version,
            entry="openhands/sdk/agent/agent.py",
            entry_sha256="8773d6e759bced7ca8791b665ae7b457487629b41f812c428f7f7da9713ae1a5",
            build=lambda target: install_lock(_LOCK, find_python(_PYTHON), target),
            tag=f"py{_PYTHON.replace('.', '')}",
        )

    def python(self) -> Path:
        """See `Forked.python`."""
        return find_python(_PYTHON)

    def import_env(self, library: Path) -> Mapping[str, str]:
        """See `Forked.import_env`."""
        return {
            "HOME": "/home/agent",  # its import notes where a user's settings lie
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices, three times
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "LOG_LEVEL": "WARNING",
        }

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`."""
        config = {
            "llm": _llm(base_url, token, limits),
            "task": instruction.rstrip(),
            "turns": limits.turns,
            "lean": _LEAN_PROMPT if self.lean else None,
            "workspace": WORKDIR,
            "persistence": None if self.lean else _STATE,
            "result": _RESULT,
        }
        return Launch(
            argv=self.program(_CONFIG),
            env={**self.import_env(Path(self.target)), "INPUTRC": _INPUTRC},
            files={_CONFIG: json.dumps(config).encode(), _INPUTRC: b"set enable-bracketed-paste off\n"},
        )

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`. Read from the file that the runner leaves."""
        if result.timed_out:
            return Outcome("agent_deadline")
        try:
            end = json.loads(await sandbox.get(_RESULT))
            status, error = str(end["status"]), str(end["error"])
        except (TransferError, ValueError, KeyError, TypeError) as failure:
            raise broken(self.name, result, f"left no readable result: {failure}") from failure
        if status == "finished":
            return Outcome("submitted")
        if status == "stuck":
            return Outcome("format_errors", "the same step again and again")
        if error.startswith("MaxIterationsReached"):
            return Outcome("turn_limit")
        if overflow_in(error):
            return Outcome("context_overflow", error)
        raise broken(self.name, result, f"ended with {status}: {error}")


def _llm(base_url: str, token: str, limits: HarnessLimits) -> dict[str, Any]:
    """Fields of the SDK's `LLM`: nothing is cached, retried or asked for that the proxy decides anyway."""
    return {
        "model": f"openai/{MODEL_NAME}",
        "base_url": f"{base_url}/v1",
        "api_key": token,
        "usage_id": "agent",
        "num_retries": 0,
        "timeout": _REQUEST_S,
        "max_input_tokens": limits.context_tokens,
        "max_output_tokens": limits.reply_tokens,
        "reasoning_effort": None,
        "caching_prompt": False,
        "disable_vision": True,
    }
