"""Where a request continues: the tree of conversations a trial has had, and the longest known prefix.

Invariant: a path from a root to a node is a conversation as the harness showed it, and a node with an `end`
knows a segment whose first `end` tokens are that conversation as the policy saw it. Equality of content is
asked of system, user and tool messages only; an assistant turn is recognised by the tool-call ids that this
proxy issued, whatever became of its arguments, or, without calls, by its trimmed text in its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from legorl.engine.base import Finish
from legorl.proxy.messages import Message, Role
from legorl.proxy.render import Prior
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
    changed: tuple[str, ...] = ()
    """What the harness showed differently when it first echoed the turn: name, arguments, text."""
    orphan: str = ""
    """Why the turn is in no loss; empty for one that is."""


@dataclass(eq=False)
class Node:
    """A conversation: its parent's, and one message more."""

    id: int
    parent: Node | None
    message: Message | None
    """None for a root."""
    tools: int = 0
    """Of a root: index of its tool list."""
    thread: str = ""
    turn: Turn | None = None
    segment: Segment | None = None
    end: int | None = None
    children: dict[MatchKey, Node] = field(default_factory=dict)

    @property
    def prior(self) -> Prior:
        """What the node's tokens end with."""
        assert self.message is not None, "a root has no tokens"
        if self.turn is not None:
            return Prior(Role.ASSISTANT, sampled=True, ended=self.turn.ended)
        return Prior(self.message.role)


def match_key(message: Message, issued: Mapping[str, Turn]) -> MatchKey:
    """What a message is recognised by. `issued` maps tool-call ids to the turns they were issued in."""
    if message.role is not Role.ASSISTANT:
        return (message.role, message.text, message.call_id)
    turn = issuer(message, issued)
    if turn is not None:
        return ("turn", turn.id)
    if message.calls:
        return (message.role, message.text.strip(), message.calls)
    return ("said", message.text.strip())


def issuer(message: Message, issued: Mapping[str, Turn]) -> Turn | None:
    """The turn whose call ids an assistant message carries; None for none, or for a mixture of turns."""
    turns = {turn.id: turn for call in message.calls if (turn := issued.get(call.id)) is not None}
    return next(iter(turns.values())) if len(turns) == 1 else None


def locate(root: Node, messages: Sequence[Message], keys: Sequence[MatchKey]) -> tuple[Node, int]:
    """The deepest node whose conversation `messages` begins with, and how many messages that is."""
    node = root
    for depth, key in enumerate(keys):
        child = node.children.get(key)
        if child is None:
            return node, depth
        node = child
        turn = node.turn
        if turn is not None and not turn.echoed:
            turn.echoed = True
            turn.changed = _changes(turn.message, messages[depth])
    return node, len(keys)


def anchor_of(node: Node) -> Node:
    """The nearest node at or above `node` whose tokens are known; a root if there is none."""
    while node.parent is not None and node.end is None:
        node = node.parent
    return node


def _changes(issued: Message, shown: Message) -> tuple[str, ...]:
    changed = []
    if issued.text.strip() != shown.text.strip():
        changed.append("text")
    if [call.name for call in issued.calls] != [call.name for call in shown.calls]:
        changed.append("name")
    if [call.arguments for call in issued.calls] != [call.arguments for call in shown.calls]:
        changed.append("arguments")
    return tuple(changed)
