"""mini-swe-agent 2.4.6, unmodified from PyPI.

It runs with its own agent, environment and templates; only the model class is ours, by mini's extension point
(`inside/mini_model.py`), because the default one imports litellm for 4 s of CPU at every start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl.errors import TransferError
from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import base_python, pip_install
from legorl.harness.forked import Forked
from legorl.harness.install import Runtime
from legorl.harness.program import MODEL_NAME, broken, overflow_in
from legorl.sandbox.base import ExecResult, Sandbox

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


class MiniSweAgent(Forked):
    """Adapter of mini-swe-agent."""

    name = "mini_swe_agent"
    version = "2.4.6"
    wire = Wire.OPENAI_CHAT
    runner = "mini_runner"

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

    def python(self) -> Path:
        """See `Forked.python`."""
        return base_python()

    def import_env(self, library: Path) -> Mapping[str, str]:
        """See `Forked.import_env`. Its directory of settings has to be one that is there."""
        return {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(library)}

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
        specs = (_CONFIG,) if self.lean else ("mini.yaml", _CONFIG)  # later ones win
        return Launch(
            argv=self.program(*specs),
            env={
                **self.import_env(Path(self.target)),
                "OPENAI_API_KEY": token,
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            },
            files={_CONFIG: json.dumps(config).encode()},
        )

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
