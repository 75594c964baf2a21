"""Tells a trial as it happens: phases with their times, the agent's turns, how it ended.

Invariant: it only looks; a trial goes the same way whether anybody is told of it or not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from legorl.errors import UserError
from legorl.proxy.echoes import Turn
from legorl.proxy.messages import Role
from legorl.proxy.session import Session
from legorl.proxy.transcript import Transcript
from legorl.trial.record import PhaseRecord, TrialRecord

_POLL_S = 0.2
_WIDTH = 100
_FAILED = 8


class Story:
    """A `legorl.trial.phases.Watcher` that says what it sees, a line at a time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._start = time.monotonic()
        self._ledger: Transcript | None = None
        self._looking: asyncio.Task[None] | None = None
        self._turns = self._nodes = 0

    def _line(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._start:7.2f} s  {text}")

    def began(self, phase: str, attempt: int) -> None:
        """See `Watcher`."""
        self._line(phase if attempt == 1 else f"{phase}, attempt {attempt}")

    def failed(self, phase: str, cause: str, detail: str, *, again: bool) -> None:
        """See `Watcher`."""
        self._line(f"{phase} failed [{cause}]: {detail}{' Once more.' if again else ''}")

    def ended(self, record: PhaseRecord) -> None:
        """See `Watcher`."""
        if record.name == "agent":
            self._look()
            if self._looking is not None:
                self._looking.cancel()
        how = f"ended: {record.cause}" if record.cause else "done"
        self._line(f"{record.name} {how} ({record.end - record.start:.2f} s)")

    def opened(self, session: Session) -> None:
        """See `Watcher`."""
        self._ledger = session.ledger
        self._looking = asyncio.get_running_loop().create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            self._look()

    def _look(self) -> None:
        """Say what is new in the ledger: results first, for they answer the turns that were seen before."""
        if self._ledger is None:
            return
        nodes, turns = self._ledger.nodes[self._nodes :], self._ledger.turns[self._turns :]
        self._nodes, self._turns = self._nodes + len(nodes), self._turns + len(turns)
        results = {
            node.message.call_id: node.message.text
            for node in nodes
            if node.message is not None and node.message.role is Role.TOOL
        }
        known = {call.id for turn in turns for call in turn.message.calls}
        for call, text in results.items():
            if call not in known:
                self._result(text)
        for number, turn in enumerate(turns, self._turns - len(turns) + 1):
            for words, call in _words(turn):
                self._line(f"  {number:3d}  {words}")
                if call in results:
                    self._result(results[call])

    def _result(self, text: str) -> None:
        self._say(f"{'':17}{short(text) or '(no output)'}")


def _words(turn: Turn) -> Iterator[tuple[str, str]]:
    """What a turn says and does, each with the id of its call."""
    thread = "" if turn.segment.thread == "main" else f"[{turn.segment.thread}] "
    if turn.message.text.strip():
        yield thread + short(turn.message.text), ""
    for call in turn.message.calls:
        yield f"{thread}{call.name} {short(_argument(call.arguments))}", call.id


def _argument(arguments: str) -> str:
    """The command of a call where it has one, else all its arguments."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(values, dict):
        for key in ("command", "cmd"):
            if key in values:
                return str(values[key])
    return arguments


def short(text: str) -> str:
    """On one line, cut in the middle."""
    line = " ⏎ ".join(text.split("\n")).strip(" ⏎")
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH * 2 // 3]} … {line[-_WIDTH // 3 :]}"


def conclusion(record: TrialRecord, run_dir: Path) -> list[str]:
    """How a trial came out, and where it lies."""
    directory = run_dir / record.path
    reward = "not graded" if record.reward is None else f"reward {record.reward:g}"
    excluded = ", excluded" if record.excluded else ""
    tokens = f"{record.turns} turns, {record.sampled_tokens} tokens"
    lines = [f"{reward}: {record.termination}{excluded} ({tokens}, {record.phase_s.get('total', 0.0):.2f} s)"]
    lines += [record.detail] if record.detail else []
    failed = [f"failed: {name}: {short(message)}" for name, message in _failed(directory).items()]
    lines += failed[:_FAILED]
    if len(failed) > _FAILED:
        lines.append(f"({len(failed) - _FAILED} more in {directory / 'verifier' / 'result.json'})")
    return [*lines, f"record: {directory}", f"look:   legorl trial show {directory}"]


def _failed(directory: Path) -> dict[str, str]:
    file = directory / "verifier" / "result.json"
    if not file.is_file():
        return {}
    try:
        return {str(name): str(message) for name, message in json.loads(file.read_bytes())["failed"].items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{file} is no result of a verifier: {error}.") from error
