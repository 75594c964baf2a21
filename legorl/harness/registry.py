"""Which harnesses there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from legorl.config.schema import HarnessConfig
from legorl.errors import UserError
from legorl.harness.base import Harness
from legorl.harness.claude_code import ClaudeCode
from legorl.harness.codex import Codex
from legorl.harness.mini_swe_agent import MiniSweAgent
from legorl.harness.opencode import OpenCode
from legorl.harness.openhands import OpenHands
from legorl.harness.qwen_code import QwenCode

HARNESSES: dict[str, Callable[[HarnessConfig], Harness]] = {
    "mini_swe_agent": MiniSweAgent,
    "claude_code": ClaudeCode,
    "opencode": OpenCode,
    "openhands": OpenHands,
    "codex": Codex,
    "qwen_code": QwenCode,
}


def get_harness(config: HarnessConfig) -> Harness:
    """The adapter that `config.name` asks for.

    Raises:
        UserError: no such harness, or no such profile.
    """
    adapter = HARNESSES.get(config.name)
    if adapter is None:
        close = difflib.get_close_matches(config.name, HARNESSES, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UserError(f"There is no harness {config.name!r}.{hint} Known: {', '.join(sorted(HARNESSES))}.")
    return adapter(config)
