"""OpenCode 1.18.33: the native binary of its npm package (the build that needs no AVX2), no Node needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import npm_files
from legorl.harness.install import Runtime
from legorl.harness.program import MODEL_NAME, Program, broken, events_in, overflow_in
from legorl.sandbox.base import ExecResult, Sandbox

_PACKAGE = "opencode-linux-x64-baseline"
_CONFIG = "/tmp/legorl/opencode.json"
_LEAN_PROMPT = "You are a coding agent. Use the bash tool to solve the task. When it is solved, say so."


class OpenCode(Program):
    """Adapter of OpenCode."""

    name = "opencode"
    version = "1.18.33"
    wire = Wire.OPENAI_CHAT

    def runtime(self) -> Runtime:
        """See `Program.runtime`."""

        def build(target: Path) -> None:
            npm_files(_PACKAGE, self.version, {"bin/opencode": target / "opencode"})

        return Runtime(
            name=self.name,
            version=self.version,
            entry="opencode",
            entry_sha256="0abbb7c32ab0294c0a7bfa2705f9ff0df5dce5ab721d1f00cccfe393f2a11427",
            build=build,
        )

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`. With a title given, OpenCode asks the model for none."""
        config = _common(base_url, token, limits)
        if self.lean:
            config["permission"] = {"*": "deny", "bash": "allow"}
            config["agent"] = {"build": {"prompt": _LEAN_PROMPT}, "title": {"disable": True}}
            config["compaction"] = {"auto": False, "prune": False}
        return Launch(
            argv=(
                f"{self.target}/opencode",
                "run",
                "--format",
                "json",
                "--title",
                "task",
                instruction.rstrip(),
            ),
            env={
                "OPENCODE_CONFIG": _CONFIG,
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                "OPENCODE_EXPERIMENTAL_BASH_DEFAULT_TIMEOUT_MS": str(limits.command_timeout_s * 1000),
                "npm_config_fetch_retries": "0",  # it asks npm for its plug-in types; there is no network
            },
            files={_CONFIG: json.dumps(config).encode()},
        )

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`. Read from the stream of events."""
        if result.timed_out:
            return Outcome("agent_deadline")
        events = events_in(result.stdout)
        for error in (str(event.get("error")) for event in events if event.get("type") == "error"):
            if overflow_in(error):
                return Outcome("context_overflow", error)
            raise broken(self.name, result, f"ended with an error: {error}")
        if result.code == 0 and any(event.get("type") == "step_finish" for event in events):
            return Outcome("submitted")
        raise broken(self.name, result, "ended without an event that says why")


def _common(base_url: str, token: str, limits: HarnessLimits) -> dict[str, Any]:
    """Settings of both profiles, in OpenCode's own configuration schema."""
    size = {"context": limits.context_tokens, "output": limits.reply_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{base_url}/v1", "apiKey": token},
        "models": {MODEL_NAME: {"name": MODEL_NAME, "limit": size}},
    }
    return {
        "provider": {"legorl": provider},
        "model": f"legorl/{MODEL_NAME}",
        "small_model": f"legorl/{MODEL_NAME}",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"*": "allow"},
    }
