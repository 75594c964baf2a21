"""Codex CLI 0.171.0: the native binary of its npm package and the helpers beside it, no Node needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import npm_files
from legorl.harness.install import Runtime
from legorl.harness.program import MODEL_NAME, Program, broken, events_in, overflow_in
from legorl.sandbox.base import WORKDIR, ExecResult, Sandbox

_PACKAGE = "@openai/codex"
_VENDOR = "vendor/x86_64-unknown-linux-musl"
_HOME = "/home/agent/.codex"
"""Not below /tmp: there it makes no helper programs, and says so in its output."""
_TOKEN = "LEGORL_TOKEN"
_FULL = "ran out of room in the model's context window"
_CUT_REPLY = "reason: max_output_tokens"
_LEAN_PROMPT = "You are a coding agent. Use exec_command to solve the task. When it is solved, say so."
_LEAN_OFF = ("multi_agent", "goals", "view_image", "apps", "plugins", "tool_suggest", "image_generation",
             "skill_search", "sleep_tool", "workspace_dependencies", "shell_snapshot")  # fmt: skip
"""Features that the small profile switches off: tools it does not need, and searches at a start."""


class Codex(Program):
    """Adapter of the Codex CLI."""

    name = "codex"
    version = "0.171.0"
    wire = Wire.OPENAI_RESPONSES

    def runtime(self) -> Runtime:
        """See `Program.runtime`. The platform's package has a version of its own."""

        def build(target: Path) -> None:
            npm_files(_PACKAGE, f"{self.version}-linux-x64", {_VENDOR: target / "codex"})

        return Runtime(
            name=self.name,
            version=self.version,
            entry="codex/bin/codex",
            entry_sha256="b76a027d6b210f9a8da7aaf321dd235c700f0ef7a794d4a5314b9af6c134f0f0",
            build=build,
        )

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`. It has no turn limit of its own; the proxy keeps it."""
        settings = _common(base_url, limits)
        files = {}
        if self.lean:
            prompt = f"{_HOME}/instructions.md"
            files[prompt] = _LEAN_PROMPT.encode()
            settings |= {
                "model_instructions_file": prompt,
                "include_permissions_instructions": False,
                "include_apps_instructions": False,
                "include_collaboration_mode_instructions": False,
                "include_environment_context": False,
                "project_doc_max_bytes": 0,
                "skills.include_instructions": False,
                "skills.bundled.enabled": False,
                # No compaction: it would rewrite the history.
                "model_auto_compact_token_limit": 1 << 40,
                **{f"features.{name}": False for name in _LEAN_OFF},
            }
        files[f"{_HOME}/config.toml"] = _toml(settings).encode()
        options = ("--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        return Launch(
            argv=(f"{self.target}/codex/bin/codex", "exec", *options, "--cd", WORKDIR, instruction.rstrip()),
            env={"CODEX_HOME": _HOME, _TOKEN: token},
            files=files,
        )

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`. Read from the stream of events."""
        if result.timed_out:
            return Outcome("agent_deadline")
        events = events_in(result.stdout)
        for event in reversed(events):
            if event.get("type") == "turn.completed" and result.code == 0:
                return Outcome("submitted")
            if event.get("type") in ("turn.failed", "error"):
                error = str(event.get("error") or event.get("message"))
                if overflow_in(error) or _FULL in error:
                    return Outcome("context_overflow", error)
                if _CUT_REPLY in error:  # a reply ran into its token limit: the policy's doing
                    return Outcome("format_errors", error)
                raise broken(self.name, result, f"ended with an error: {error}")
        raise broken(self.name, result, "ended without an event that says why")


def _common(base_url: str, limits: HarnessLimits) -> dict[str, Any]:
    """Settings of both profiles: dotted key of Codex's own configuration -> value."""
    provider = "model_providers.legorl"
    return {
        "model": MODEL_NAME,
        "model_provider": "legorl",
        "model_context_window": limits.context_tokens,
        "check_for_update_on_startup": False,
        "allow_login_shell": False,  # a login shell would reset the PATH
        "web_search": "disabled",
        "history.persistence": "none",
        "analytics.enabled": False,
        "feedback.enabled": False,
        f"{provider}.name": "legorl",
        f"{provider}.base_url": f"{base_url}/v1",
        f"{provider}.env_key": _TOKEN,
        f"{provider}.wire_api": "responses",
        f"{provider}.request_max_retries": 2,
        f"{provider}.stream_max_retries": 2,
        f"{provider}.stream_idle_timeout_ms": 3_600_000,
        f"{provider}.supports_websockets": False,
    }


def _toml(settings: Mapping[str, Any]) -> str:
    """One `key = value` line each: a JSON string, number or boolean is a TOML one too."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
