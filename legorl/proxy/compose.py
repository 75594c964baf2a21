"""The tokens that take a context from one known point to the next generation prompt.

Invariant: a turn the policy sampled goes in as it was sampled, also where the harness moved it (a compacted
history that keeps its last turns); everything else goes through the model's chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from legorl.proxy.echoes import Turn
from legorl.proxy.messages import Message, Role, Tool
from legorl.proxy.render import Prior, Renderer
from legorl.proxy.segment import Ids


@dataclass(frozen=True)
class Composed:
    """Tokens to append, and for each message where it ends in them."""

    ids: Ids
    ends: list[int | None]
    """Tokens up to the end of the message; None where the template gives no boundary."""
    turns: list[Turn | None]
    """The sampled turn that stands in the message's place."""


class _Composition:
    def __init__(self, renderer: Renderer, prior: Prior | None, tools: Sequence[Tool]) -> None:
        self._renderer = renderer
        self._prior = prior
        self._tools = tools
        self._parts: list[Ids] = []
        self._length = 0
        self._pending: list[Message] = []
        self._ends: list[int | None] = []
        self._turns: list[Turn | None] = []

    def result(self) -> Composed:
        return Composed(np.concatenate(self._parts), self._ends, self._turns)

    @property
    def begun(self) -> bool:
        return self._prior is not None or bool(self._pending)

    def message(self, message: Message) -> None:
        self._pending.append(message)
        self._ends.append(None)
        self._turns.append(None)

    def turn(self, turn: Turn) -> None:
        self._append(turn.token_ids)
        self._ends.append(self._length)
        self._turns.append(turn)
        self._prior = Prior(Role.ASSISTANT, sampled=True, ended=turn.ended)

    def prompt(self) -> bool:
        """Render what is pending and a generation prompt; False where the template gives no way to."""
        if self._prior is None:
            ids: Ids | None = self._renderer.opening(self._pending, self._tools)
        else:
            ids = self._renderer.following(self._prior, self._pending, bool(self._tools))
        if ids is None:
            return False
        self._append(ids)
        if self._pending:
            self._ends[-1] = self._length
        self._append(self._renderer.generation_ids)
        self._pending = []
        return True

    def _append(self, ids: Ids) -> None:
        self._parts.append(ids)
        self._length += len(ids)


def compose(
    renderer: Renderer,
    prior: Prior | None,
    rest: Sequence[Message],
    tools: Sequence[Tool],
    author: Callable[[Message], Turn | None],
) -> Composed | None:
    """Tokens for `rest` after a context that ends with `prior` (None: an empty one), and a generation prompt.

    `author` gives the sampled turn that an assistant message shows. None where the template does not print
    `prior` the same way when `rest` follows it; never None for an empty context.

    Raises:
        Refusal: the template does not accept the messages.
    """
    turns = [author(message) if message.role is Role.ASSISTANT else None for message in rest]
    composed = _compose(renderer, prior, rest, tools, turns)
    if composed is None and prior is None:
        return _compose(renderer, None, rest, tools, [None] * len(rest))
    return composed


def _compose(
    renderer: Renderer,
    prior: Prior | None,
    rest: Sequence[Message],
    tools: Sequence[Tool],
    turns: Sequence[Turn | None],
) -> Composed | None:
    composition = _Composition(renderer, prior, tools)
    for message, turn in zip(rest, turns, strict=True):
        if turn is None or not composition.begun:
            composition.message(message)
        elif composition.prompt():
            composition.turn(turn)
        else:
            return None
    return composition.result() if composition.prompt() else None
