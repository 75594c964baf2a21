"""Which harnesses there are."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module

from legorl.config.schema import HarnessConfig
from legorl.errors import UserError
from legorl.harness.base import Harness
from legorl.harness.claude_code import ClaudeCode
from legorl.harness.codex import Codex
from legorl.harness.mini_swe_agent import MiniSweAgent
from legorl.harness.opencode import OpenCode
from legorl.harness.openhands import OpenHands
from legorl.harness.program import Program
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
    """The adapter that `config` asks for: one of the above by name, or the user's own by import path.

    Raises:
        UserError: no such harness, no such profile, or nothing to import at `harness.target`.
    """
    if config.target:
        own: Harness = _imported(config.target)(config)  # type: ignore[assignment]  # its methods are its own
        return own
    adapter = HARNESSES.get(config.name)
    if adapter is None:
        close = difflib.get_close_matches(config.name, HARNESSES, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UserError(
            f"There is no harness {config.name!r}.{hint} Known: {', '.join(sorted(HARNESSES))}. "
            "One of your own is named by harness.target=package.module:Class."
        )
    return adapter(config)


def _imported(target: str) -> type[Program]:
    """The class at an import path. Raises `UserError`."""
    module, _, name = target.partition(":")
    try:
        adapter = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"harness.target={target!r} cannot be imported: {error}. It is written package.module:Class, and "
            "the package is installed in this environment or on PYTHONPATH."
        ) from error
    if not (isinstance(adapter, type) and issubclass(adapter, Program)):
        raise UserError(f"harness.target={target!r} is not a subclass of legorl.harness.program.Program.")
    return adapter
