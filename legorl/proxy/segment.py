"""A segment: one growing token sequence, with what the engine said about each token it sampled.

Invariants: arrays grow at their end or are cut at their end; appending costs the new tokens (amortised), and
a fork copies no routing; tokens enter as context (mask False, NaN, -1) or as a sample of the engine (mask
True), never otherwise.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legorl.engine.base import Sample
from legorl.proxy.arrays import Blocks, Growing

Ids = NDArray[np.int32]


class Segment:
    """One token sequence of a thread.

    T tokens so far. `tokens` int32 [T], `mask` bool [T], `logprobs` float32 [T], `versions` int32 [T];
    `routing` [R, L, K] and `routed` bool [R] hold the forward passes at positions 0..R-1, R <= T.
    """

    def __init__(self, id: int, thread: str, parent_thread: str | None) -> None:
        self.id = id
        self.thread = thread
        self.parent_thread = parent_thread
        self.forked_from: tuple[int, int] | None = None
        """(segment, tokens taken over from it)."""
        self.tokens = Growing(np.int32)
        self.mask = Growing(np.bool_)
        self.logprobs = Growing(np.float32)
        self.versions = Growing(np.int32)
        self.routing: Blocks | None = None
        self.routed = Growing(np.bool_)
        self.busy = False
        """A request that extends this segment is in flight."""
        self._hash = hashlib.blake2b(digest_size=16)
        self._hashed = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def append_context(self, ids: Ids) -> None:
        """Add tokens that the policy did not write here."""
        self.tokens.append(ids)
        self.mask.fill(len(ids), False)
        self.logprobs.fill(len(ids), np.nan)
        self.versions.fill(len(ids), -1)

    def append_sample(self, sample: Sample) -> None:
        """Add what the engine sampled, and the routing rows that are new."""
        self.tokens.append(sample.token_ids)
        self.mask.fill(len(sample.token_ids), True)
        self.logprobs.append(sample.logprobs)
        self.versions.append(sample.weight_version)
        if sample.routed_experts is not None:
            self._append_routing(sample.routed_experts, sample.routed_start)

    def cut(self, length: int) -> None:
        """Take the segment back to its first `length` tokens."""
        for array in (self.tokens, self.mask, self.logprobs, self.versions, self.routed):
            array.cut(length)
        if self.routing is not None:
            self.routing.cut(length)
        if self._hashed > length:
            self._hash, self._hashed = hashlib.blake2b(digest_size=16), 0

    def take_context(self, other: Segment, length: int) -> None:
        """Begin with the first `length` tokens of another segment as context, and their routing."""
        self.forked_from = (other.id, length)
        self.append_context(other.tokens.view[:length])
        if other.routing is not None:
            rows = min(length, len(other.routing))
            self.routing = other.routing.head(rows)
            self.routed.append(other.routed.view[:rows])

    def take_turn(self, other: Segment, start: int) -> None:
        """Begin with all of another segment; what it sampled from `start` on moves here, mask and all."""
        self.take_context(other, len(other))
        self.forked_from = (other.id, start)
        for mine, theirs in ((self.mask, other.mask), (self.logprobs, other.logprobs)):
            mine.view[start:] = theirs.view[start:]
        self.versions.view[start:] = other.versions.view[start:]
        other.cut(start)

    @property
    def routed_rows(self) -> int:
        """Forward passes already on record: the engine is asked for rows from here on."""
        return len(self.routed)

    def digest(self) -> str:
        """Hash of all tokens so far; costs only those added since the last call."""
        self._hash.update(self.tokens.view[self._hashed :].data)
        self._hashed = len(self.tokens)
        return self._hash.hexdigest()

    def _append_routing(self, rows: NDArray[Any], start: int) -> None:
        if self.routing is None:
            self.routing = Blocks(rows.dtype, rows.shape[1:])
        known = len(self.routing)
        if start > known:  # the engine left some out; they stay marked as not recorded
            self.routing.fill(start - known, 0)
            self.routed.fill(start - known, False)
            known = start
        new = rows[known - start :]
        self.routing.append(new)
        self.routed.fill(len(new), True)


def digest(ids: Ids) -> str:
    """Hash of a token sequence, as `Segment.digest` gives it."""
    data = np.ascontiguousarray(ids, dtype=np.int32)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()
