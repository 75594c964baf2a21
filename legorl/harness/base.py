"""What a harness is: an unmodified agent program, how it is started, and how its end is read.

Invariant: an adapter never changes the program's control flow; it only uses settings, environment and
extension points that the program offers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from legorl.sandbox.base import ExecResult, Mount, Sandbox


class Wire(StrEnum):
    """Protocol a harness speaks to its model."""

    ANTHROPIC = "anthropic"
    OPENAI_CHAT = "openai_chat"
    OPENAI_RESPONSES = "openai_responses"


class ThreadKind(StrEnum):
    """Who is speaking in a request."""

    MAIN = "main"
    SUBAGENT = "subagent"
    SIDE = "side"


@dataclass(frozen=True)
class Speaker:
    """The thread a request belongs to; `key` tells two threads of one kind apart."""

    kind: ThreadKind
    key: str = "main"
    parent: str | None = None
    label: str = ""
    """For `SIDE`: title, compaction, …"""


@dataclass(frozen=True)
class HarnessLimits:
    """Limits handed to the harness's own settings."""

    turns: int
    context_tokens: int
    reply_tokens: int
    command_timeout_s: int


@dataclass(frozen=True)
class Launch:
    """How to start the harness for one trial. Paths are paths in the sandbox."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The harness's own end state: `termination` names a row of `legorl.trial.termination`."""

    termination: str
    detail: str = ""


class Harness(Protocol):
    """One harness."""

    name: str
    version: str
    wire: Wire

    def install(self, cache: Path) -> Path:
        """Build the read-only runtime below `cache` (idempotent, verified, atomic); returns its path."""

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Mounts that a sandbox needs. Raises `UserError` naming the install command when not installed."""

    def command(self, instruction: str, base_url: str, token: str, limits: HarnessLimits) -> Launch:
        """How to start it on `instruction`; `base_url` is the trial's prefix on the proxy, without `/v1`."""

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        """Put the files, run to the end or the deadline."""

    async def outcome(self, sandbox: Sandbox, result: ExecResult) -> Outcome:
        """Read the end state from exit code, output and files. Raises `HarnessError` when it broke."""

    def speaker(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Speaker:
        """Who is speaking. Header names are lower case."""

    async def close(self) -> None:
        """Release what the adapter holds (a fork server)."""
