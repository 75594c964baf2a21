"""Where a request continues: the tree of conversations a trial has had, and what a request begins with.

Invariant: a path from a root to a node is a conversation as the harness showed it, and a node with an `end`
knows a segment whose first `end` tokens are that conversation as the policy saw it. Equality of content is
asked of system, user and tool messages only; an assistant turn is recognised by the tool-call ids that this
proxy issued (`echoes.py`), or, without calls, by its text in its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from legorl.proxy.echoes import Issued, MatchKey, Turn, changes, echo_below
from legorl.proxy.messages import Message, Role
from legorl.proxy.render import Prior
from legorl.proxy.segment import Segment


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


class Place(NamedTuple):
    """A known conversation, and how many messages of a request show it."""

    node: Node
    depth: int


def trace(root: Node, messages: Sequence[Message], keys: Sequence[MatchKey], issued: Issued) -> list[Place]:
    """The known conversations that `messages` begins with, the shortest first; `keys` are the messages'."""
    node, depth = root, 0
    path = [Place(node, depth)]
    while depth < len(keys):
        child = node.children.get(keys[depth])
        place = Place(child, depth + 1) if child else _regrouped(node, depth, messages, keys, issued)
        if place is None:
            break
        turn = place.node.turn
        if turn is not None and not turn.echoed:
            turn.echoed = True
            turn.changed = changes(turn.message, messages[depth])
        path.append(place)
        node, depth = place
    return path


def _regrouped(
    node: Node, depth: int, messages: Sequence[Message], keys: Sequence[MatchKey], issued: Issued
) -> Place | None:
    """The same conversation in other messages: neighbours of one role put together, or taken apart."""
    message = messages[depth]
    if message.role is Role.ASSISTANT:
        child = None if issued.observed else _echo(node, message, keys[depth])
        return Place(child, depth + 1) if child else None
    if message.role is Role.TOOL:
        return None
    taken_apart = _spelled(node, message.role, message.text)
    return Place(taken_apart, depth + 1) if taken_apart else _joined(node, depth, messages)


def _echo(node: Node, message: Message, key: MatchKey) -> Node | None:
    """The turn that an assistant message shows with other text around it or less of it."""
    children = list(node.children.values())
    for child in children:  # a message that the harness put before the turn, now in one with it
        if child.turn is None and child.message is not None and child.message.role is Role.ASSISTANT:
            head = child.message.text.strip()
            if message.text.strip().startswith(head):
                if key in child.children:
                    return child.children[key]
                rest = message.text.strip()[len(head) :]
                below = child.children.get(("said", rest.strip())) if rest and not message.calls else None
                if below is not None:
                    return below
    turns = {
        child.turn.id: child for child in children if child.turn is not None and child.segment is not None
    }
    found = echo_below([child.turn for child in turns.values() if child.turn is not None], message)
    return turns[found.id] if found is not None else None


def _spelled(node: Node, role: Role, text: str) -> Node | None:
    """The node below whose messages of one role, line by line, are `text`."""
    pending = [(node, text)]
    while pending:
        node, text = pending.pop()
        for child in node.children.values():
            shown = child.message
            if shown is None or shown.role is not role:
                continue
            if shown.text == text:
                return child
            if text.startswith(shown.text + "\n"):
                pending.append((child, text[len(shown.text) + 1 :]))
    return None


def _joined(node: Node, depth: int, messages: Sequence[Message]) -> Place | None:
    """The child whose text several messages of one role from `depth` on are, put together."""
    role, text = messages[depth].role, messages[depth].text
    longest = max((len(child.message.text) for child in node.children.values() if child.message), default=0)
    for end in range(depth + 1, len(messages)):
        if messages[end].role is not role or len(text) + len(messages[end].text) >= longest:
            return None
        text = f"{text}\n{messages[end].text}"
        child = node.children.get((role, text, ""))
        if child is not None:
            return Place(child, end + 1)
    return None
