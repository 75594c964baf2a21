"""The policy's turns, and how they are known again in what a harness sends back.

Invariant: server-issued tool-call ids decide. Harnesses re-serialise arguments, repair or replace them,
rename tools, move, trim or drop text; an id comes back as it was issued. With `observed` set (a setting for
studies) a turn counts as itself only where the harness shows it unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from legorl.engine.base import Finish
from legorl.proxy.messages import Message, Role
from legorl.proxy.segment import Ids, Segment

MatchKey = tuple[object, ...]


@dataclass(eq=False)
class Turn:
    """One reply of the engine, and what became of it."""

    id: str
    segment: Segment
    start: int
    end: int
    finish: Finish
    message: Message
    """As issued to the harness."""
    kind: str
    """How its request was aligned: open, extend, fork or retry."""
    ended: bool
    """Its last token is the template's end-of-turn token."""
    token_ids: Ids
    prompt_digest: str
    sample_digest: str
    delivered: bool = False
    """The whole answer went out to a harness that was there."""
    echoed: bool = False
    """The harness has shown it in a later request."""
    superseded: bool = False
    """Its request came again before it was echoed."""
    changed: tuple[str, ...] = ()
    """What the harness showed differently when it first echoed the turn: name, arguments, text."""
    orphan: str = ""
    """Why the turn is in no loss; empty for one that is."""


@dataclass
class Issued:
    """The turns of a trial by the tool-call ids that were issued with them."""

    observed: bool = False
    _turns: dict[str, Turn] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        """Remember a turn's calls."""
        for call in turn.message.calls:
            self._turns[call.id] = turn

    def author(self, message: Message) -> Turn | None:
        """The turn that an assistant message counts as; None for none, or a mixture of turns."""
        author = self._shown(message)
        return None if author and self.observed and changes(author.message, message) else author

    def note_shown(self, messages: Iterable[Message]) -> None:
        """Mark the turns that a request shows, wherever and however: they have reached the harness."""
        for message in messages:
            turn = self._shown(message)
            if turn is not None:
                turn.echoed = True

    def _shown(self, message: Message) -> Turn | None:
        author = None
        for call in message.calls:
            turn = self._turns.get(call.id)
            if turn is not None and author is not None and turn is not author:
                return None
            author = turn or author
        return author

    def key(self, message: Message) -> MatchKey:
        """What a message is recognised by."""
        if message.role is not Role.ASSISTANT:
            return (message.role, message.text, message.call_id)
        turn = self.author(message)
        if turn is not None:
            return ("turn", turn.id)
        if message.calls:
            return (message.role, message.text.strip(), message.calls)
        return ("said", message.text.strip())


def echo_below(turns: Sequence[Turn], message: Message) -> Turn | None:
    """Which of the turns in a position a message without calls shows: the same but for spaces, or, of one
    that arrived whole, no more than its beginning (protocols in text keep the first call only)."""
    shown = _squeezed(message.text)
    if message.calls or not shown:
        return None
    plain = [turn for turn in turns if not turn.message.calls]
    for turn in plain:
        if _squeezed(turn.message.text) == shown:
            return turn
    started = [turn for turn in plain if turn.delivered and _squeezed(turn.message.text).startswith(shown)]
    return started[0] if len(started) == 1 else None


def changes(issued: Message, shown: Message) -> tuple[str, ...]:
    """What a harness shows otherwise than it got it: text, name, arguments. Spaces around a text and the
    spelling of the same JSON do not count."""
    changed = []
    if issued.text.strip() != shown.text.strip():
        changed.append("text")
    if [call.name for call in issued.calls] != [call.name for call in shown.calls]:
        changed.append("name")
    if [call.arguments for call in issued.calls] != [call.arguments for call in shown.calls] and (
        [_canonical(call.arguments) for call in issued.calls]
        != [_canonical(call.arguments) for call in shown.calls]
    ):
        changed.append("arguments")
    return tuple(changed)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _squeezed(text: str) -> str:
    return "".join(text.split())
