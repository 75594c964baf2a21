"""What is known of a trial's conversation: threads, segments, turns, messages; the ledger's readable half.

Invariant: `rows` gives each sampled token that is in the loss exactly once, behind exactly the tokens that
its engine call saw. Nothing here aligns or samples, so a transcript can be read back and re-checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from legorl.harness.base import ThreadKind
from legorl.proxy.align import Node
from legorl.proxy.echoes import Turn
from legorl.proxy.messages import Json, Tool
from legorl.proxy.row import Call, Row
from legorl.proxy.segment import Segment


@dataclass(eq=False)
class Thread:
    """One speaker of a trial."""

    name: str
    kind: ThreadKind
    parent: str | None
    label: str
    roots: dict[int, Node] = field(default_factory=dict)
    """By tool list: tools are part of a conversation's prefix."""


@dataclass
class Orphan:
    """Tokens of a reply that is in no row."""

    turn: Turn
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class Transcript:
    """See the module."""

    def __init__(self, trial: str, model_dir: str) -> None:
        self.trial = trial
        self.model_dir = model_dir
        """Where the tokenizer lies that the ids are of."""
        self.threads: dict[str, Thread] = {}
        self.segments: list[Segment] = []
        self.turns: list[Turn] = []
        self.orphans: list[Orphan] = []
        self.nodes: list[Node] = []
        """Conversation tree, parents first."""
        self.tools: list[Sequence[Tool]] = []
        self.wishes: dict[str, list[Json]] = {}
        """Sampling parameters the harness asked for in vain, and their distinct values."""

    @property
    def counts(self) -> Counter[str]:
        """Answered requests by how they were aligned: open, extend, fork, retry."""
        return Counter(turn.kind for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """All tokens the engine sampled for this trial, orphans included."""
        return sum(turn.end - turn.start for turn in self.turns)

    def rows(self, threads: Collection[str] = ("main",)) -> list[Row]:
        """Training rows, one per segment with sampled tokens. `threads` names thread kinds (or names)."""
        rows = []
        for segment in self.segments:
            thread = self.threads[segment.thread]
            if thread.name in threads or thread.kind.value in threads:
                row = self._row(segment)
                if row is not None:
                    rows.append(row)
        return rows

    def _row(self, segment: Segment) -> Row | None:
        sampled = np.flatnonzero(segment.mask.view)
        if not sampled.size:
            return None
        length = int(sampled[-1]) + 1
        routing, routed = None, None
        if segment.routing is not None:
            routing = np.zeros((length - 1, *segment.routing.row_shape), segment.routing.dtype)
            segment.routing.copy_to(routing)
            routed = np.zeros(length - 1, np.bool_)
            routed[: len(segment.routed)] = segment.routed.view[: length - 1]
        return Row(
            trial=self.trial,
            segment=segment.id,
            thread=segment.thread,
            parent=segment.parent_thread,
            token_ids=segment.tokens.view[:length].copy(),
            loss_mask=segment.mask.view[:length].copy(),
            logprobs=segment.logprobs.view[:length].copy(),
            weight_version=segment.versions.view[:length].copy(),
            routed_experts=routing,
            routed_mask=routed,
            calls=tuple(
                Call(turn.id, turn.start, turn.end, turn.finish.value, turn.prompt_digest, turn.sample_digest)
                for turn in self.turns
                if turn.segment is segment and not turn.orphan
            ),
        )
