"""mini-swe-agent 2.4.6, unmodified from PyPI.

It runs with its own agent, environment and templates; only the model class is ours, by mini's extension point
(`inside/mini_model.py`), because the default one imports litellm for 4 s of CPU at every start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from legorl.config.schema import HarnessConfig
from legorl.errors import TransferError
from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import base_python, pip_install
from legorl.harness.forkserver import ForkServer, Joinable
from legorl.harness.install import Runtime, locate
from legorl.harness.program import INSIDE, INSIDE_TARGET, MODEL_NAME, Program, broken, overflow_in
from legorl.sandbox.base import ExecResult, Mount, Sandbox

_CONFIG = "/tmp/legorl/mini.json.yaml"
_TRAJECTORY = "/tmp/legorl/trajectory.json"
_REQUIREMENTS = (
    "mini-swe-agent==2.4.6",
    "annotated-types==0.8.0",
    "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3",
    "idna==3.20",
    "Jinja2==3.1.6",
    "markdown-it-py==4.3.0",
    "MarkupSafe==3.0.4",
    "mdurl==0.1.2",
    "platformdirs==4.14.9",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "Pygments==2.21.0",
    "python-dotenv==1.2.4",
    "PyYAML==6.0.4",
    "requests==2.34.2",
    "rich==15.0.0",
    "tenacity==9.2.1",
    "typing-inspection==0.4.5",
    "typing_extensions==4.16.0",
    "urllib3==2.8.0",
)
"""What the path through our model class imports; litellm, openai, datasets and the terminal stay out."""

_ENDINGS = {
    "Submitted": "submitted",
    "LimitsExceeded": "turn_limit",
    "TimeExceeded": "agent_deadline",
    "RepeatedFormatError": "format_errors",
}
_LEAN_OBSERVATION = (
    "{% set text = (output.output + output.exception_info).rstrip() %}"
    "{% if text | length > LIMIT %}{{ text[:HALF] }}\n[...]\n{{ text[-HALF:] }}"
    "{% else %}{{ text or '(no output)' }}{% endif %}"
)


class MiniSweAgent(Program):
    """Adapter of mini-swe-agent. In a sandbox of this machine its agents come from a fork server."""

    name = "mini_swe_agent"
    version = "2.4.6"
    wire = Wire.OPENAI_CHAT

    def __init__(self, config: HarnessConfig) -> None:
        super().__init__(config)
        self._server: ForkServer | None = None

    def runtime(self) -> Runtime:
        """See `Program.runtime`. Compiled dependencies tie it to one Python version."""
        return Runtime(
            name=self.name,
            version=self.version,
            entry="minisweagent/agents/default.py",
            entry_sha256="e8ef8aa365942d739c2ec5cb0879f60f377d2dc2de8ec670aaedf3bafb45a4c2",
            build=lambda target: pip_install(_REQUIREMENTS, target),
            tag=f"py{sys.version_info.major}{sys.version_info.minor}",
        )

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """See `Harness.mounts`. The library is also at its own path, where the fork server loads it from."""
        library = locate(self.runtime(), cache)
        if self._server is None:
            self._server = ForkServer(library, INSIDE)
        return (Mount(library, self.target), Mount(library, str(library)), Mount(INSIDE, INSIDE_TARGET))

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`."""
        config = _common(instruction, base_url, limits)
        if self.lean:
            config["agent"] |= {
                "system_template": "You are a helpful assistant that can interact with a computer.",
                "instance_template": "Please solve this issue: {{task}}",
            }
            config["model"] |= {
                "observation_template": _lean_observation(limits),
                "format_error_template": "error: no tool call",
            }
        program = (str(base_python()), "-I", "-S", f"{INSIDE_TARGET}/mini_runner.py", self.target)
        return Launch(
            argv=(*program, *self._specs),
            env={
                "OPENAI_API_KEY": token,
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/legorl",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            },
            files={_CONFIG: json.dumps(config).encode()},
        )

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        """See `Harness.run`."""
        if self._server is None or not isinstance(sandbox, Joinable):
            return await super().run(sandbox, launch, timeout_s)
        await self.put(sandbox, launch)
        return await self._server.run(sandbox.join, self._specs, launch.env, timeout_s)

    async def close(self) -> None:
        """See `Harness.close`."""
        if self._server is not None:
            await self._server.close()

    @property
    def _specs(self) -> tuple[str, ...]:
        """mini's configuration files, later ones win."""
        return (_CONFIG,) if self.lean else ("mini.yaml", _CONFIG)

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`. Read from the trajectory that mini writes after every step."""
        if result.timed_out:
            return Outcome("agent_deadline")
        try:
            trajectory = json.loads(await sandbox.get(_TRAJECTORY))
            status, last = trajectory["info"]["exit_status"], trajectory["messages"][-1]["content"]
        except (TransferError, ValueError, KeyError, IndexError) as error:
            raise broken(self.name, result, f"left no readable trajectory: {error}") from error
        if status in _ENDINGS:
            return Outcome(_ENDINGS[status])
        if status == "RequestRefusedError" and overflow_in(str(last)):
            return Outcome("context_overflow", str(last))
        raise broken(self.name, result, f"ended with {status or 'no exit status'}: {last}")


def _common(instruction: str, base_url: str, limits: HarnessLimits) -> dict[str, dict[str, Any]]:
    """Settings of both profiles, in mini's own configuration schema."""
    return {
        "run": {"task": instruction.rstrip()},
        "agent": {"step_limit": limits.turns, "cost_limit": 0, "output_path": _TRAJECTORY},
        "environment": {"timeout": limits.command_timeout_s},
        "model": {
            "model_class": "mini_model.ProxyModel",
            "model_name": MODEL_NAME,
            "base_url": base_url,
            "cost_tracking": "ignore_errors",
        },
    }


def _lean_observation(limits: HarnessLimits) -> str:
    """The command's output; a long one is cut in the middle to a quarter or so of the context."""
    characters = max(400, min(10_000, limits.context_tokens // 2))
    return _LEAN_OBSERVATION.replace("LIMIT", str(characters)).replace("HALF", str(characters // 2))
