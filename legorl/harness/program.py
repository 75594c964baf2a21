"""What the adapters share: an installed runtime, mounted at a fixed path, started as one command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from legorl.config.schema import HarnessConfig
from legorl.errors import HarnessError, UserError
from legorl.harness.base import Launch, Speaker, Wire
from legorl.harness.install import Runtime, install, locate
from legorl.harness.speakers import RULES, generic
from legorl.sandbox.base import ExecResult, Mount, Sandbox

PROFILES = ("lean", "stock")
MODEL_NAME = "policy"
"""The proxy takes any model name; this one makes no harness think of a model it knows."""
INSIDE = Path(__file__).parent / "inside"
"""Files of ours that run in a sandbox, and where they lie there."""
INSIDE_TARGET = "/opt/legorl/inside"
_OVERFLOW = ("context_length_exceeded", "prompt is too long", "maximum context length")
"""How the wires of the proxy say that the context, or the trial's budget, is used up."""


class Program:
    """Base of the adapters. A subclass gives `runtime()`, `command` and `outcome`; who speaks: `speakers`."""

    name: str
    version: str
    wire: Wire

    def __init__(self, config: HarnessConfig) -> None:
        if config.profile not in PROFILES:
            raise UserError(f"harness.profile is {config.profile!r}; it is one of {', '.join(PROFILES)}.")
        self.lean = config.profile == "lean"

    @property
    def target(self) -> str:
        """Where the runtime lies in a sandbox."""
        return f"/opt/legorl/{self.name}"

    def runtime(self) -> Runtime:
        """What to install."""
        raise NotImplementedError

    def install(self, cache: Path) -> Path:
        """See `Harness.install`."""
        return install(self.runtime(), cache)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """See `Harness.mounts`."""
        return (Mount(locate(self.runtime(), cache), self.target),)

    async def run(self, sandbox: Sandbox, launch: Launch, timeout_s: float) -> ExecResult:
        """See `Harness.run`."""
        await self.put(sandbox, launch)
        return await sandbox.exec(launch.argv, timeout_s=timeout_s, env=launch.env)

    async def put(self, sandbox: Sandbox, launch: Launch) -> None:
        """Put the files of a launch."""
        for path, data in launch.files.items():
            await sandbox.put(path, data)

    def speaker(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Speaker:
        """See `Harness.speaker`. A program without rules of its own is judged by content alone."""
        return RULES.get(self.name, generic)(headers, body)

    async def close(self) -> None:
        """Nothing is held between trials."""


def overflow_in(text: str) -> bool:
    """Whether an error text is the proxy's refusal of a request that does not fit."""
    return any(mark in text.lower() for mark in _OVERFLOW)


def events_in(stdout: bytes) -> list[dict[str, Any]]:
    """The events of a stream of JSON lines; other lines are passed over."""
    events = []
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def last_event(stdout: bytes, kind: str) -> dict[str, Any]:
    """The last event whose `type` is `kind`; empty when there is none."""
    return next((event for event in reversed(events_in(stdout)) if event.get("type") == kind), {})


def broken(name: str, result: ExecResult, why: str) -> HarnessError:
    """The error for an end that is not one of the harness's own."""
    tail = (result.stderr.strip() or result.stdout.strip())[-1500:].decode(errors="replace")
    return HarnessError(
        f"{name} {why} (exit code {result.code}, {result.seconds:.1f} s). Its last output:\n{tail}"
    )
