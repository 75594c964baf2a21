"""Claude Code 2.1.332: the native binary of its npm package, no Node needed."""

from __future__ import annotations

from pathlib import Path

from legorl.harness.base import HarnessLimits, Launch, Outcome, Wire
from legorl.harness.fetch import npm_files
from legorl.harness.install import Runtime
from legorl.harness.program import MODEL_NAME, Program, broken, last_event, overflow_in
from legorl.sandbox.base import ExecResult, Sandbox

_PACKAGE = "@anthropic-ai/claude-code-linux-x64"

_ENV = {
    "ANTHROPIC_MODEL": MODEL_NAME,
    "IS_SANDBOX": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_RETRIES": "2",
}
_STABLE_ENV = {
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_PROMPT_CACHING": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
    "CLAUDE_CODE_DISABLE_WORKFLOWS": "1",
    "CLAUDE_CODE_DISABLE_CRON": "1",
    "CLAUDE_CODE_DISABLE_THINKING": "1",
    "DISABLE_COMPACT": "1",
}
"""With these every request's history is an exact extension of the one before."""

_LEAST_WINDOW = 100_000
_CUT_REPLY = "output token maximum"
"""In the error with which Claude Code gives up after several replies without an end."""


class ClaudeCode(Program):
    """Adapter of Claude Code."""

    name = "claude_code"
    version = "2.1.332"
    wire = Wire.ANTHROPIC

    def runtime(self) -> Runtime:
        """See `Program.runtime`."""

        def build(target: Path) -> None:
            npm_files(_PACKAGE, self.version, {"claude": target / "claude"})

        return Runtime(
            name=self.name,
            version=self.version,
            entry="claude",
            entry_sha256="a2df1f41bb00250992926420d0063f89b127cb81abdd284dbefb80c50ff1d026",
            build=build,
        )

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """See `Harness.command`."""
        options = ["--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"]
        options += ["--max-turns", str(limits.turns)]
        env = {
            **_ENV,
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": token,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(limits.reply_tokens),
            "BASH_DEFAULT_TIMEOUT_MS": str(limits.command_timeout_s * 1000),
            "BASH_MAX_TIMEOUT_MS": str(limits.command_timeout_s * 1000),
        }
        env |= _window(limits.context_tokens)
        if self.lean:
            options = ["--bare", "--tools", "Bash", *options]
            env |= _STABLE_ENV
        return Launch(argv=(f"{self.target}/claude", "-p", instruction.rstrip(), *options), env=env)

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """See `Harness.outcome`. Read from the last line of the stream, the `result`."""
        if result.timed_out:
            return Outcome("agent_deadline")
        end = last_event(result.stdout, "result")
        if end.get("subtype") == "error_max_turns":
            return Outcome("turn_limit")
        if end.get("subtype") == "success" and not end.get("is_error"):
            return Outcome("submitted")
        text = str(end.get("result", ""))
        if overflow_in(text):
            return Outcome("context_overflow", text)
        if _CUT_REPLY in text:  # one reply after the other ran into its token limit: the policy's doing
            return Outcome("format_errors", text)
        raise broken(self.name, result, f"ended with {end.get('subtype', 'no result line')}: {text}")


def _window(context_tokens: int) -> dict[str, str]:
    """When to compact. It takes an unknown model's context for a million tokens and knows no window below
    100,000; for a smaller one it compacts at a share of that."""
    window = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(max(_LEAST_WINDOW, context_tokens))}
    if context_tokens < _LEAST_WINDOW:
        share = max(1, 80 * context_tokens // _LEAST_WINDOW)
        window["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(share)
    return window
