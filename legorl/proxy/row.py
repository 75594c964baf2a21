"""One training row: a segment of a trial as verl will see it, in numpy.

T tokens, L routed layers, K experts per token. Row j of the routing is the forward pass at position j, so
the last token has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Call:
    """One reply of the engine inside a row: tokens [start, end) were sampled in call `id`."""

    id: str
    start: int
    end: int
    finish: str
    prompt_digest: str = ""
    """Hash of the prompt as the engine got it: `segment.digest(token_ids[:start])` must give it (I3)."""
    sample_digest: str = ""
    """Hash of the reply as the engine gave it: `segment.digest(token_ids[start:end])` must give it (I1)."""


@dataclass(frozen=True)
class Row:
    """Contract in `docs/architecture.md`; invariants I1-I4 are checked by `legorl.proxy.invariants`."""

    trial: str
    segment: int
    thread: str
    parent: str | None
    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T]; True only where the engine sampled the token and this row trains it."""
    logprobs: NDArray[np.float32]
    """[T]; NaN where not sampled here."""
    weight_version: NDArray[np.int32]
    """[T]; -1 where not sampled here."""
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[T-1, L, K], None for a dense policy."""
    routed_mask: NDArray[np.bool_] | None = None
    """[T-1]; True where the engine reported the row."""
    calls: tuple[Call, ...] = field(default_factory=tuple)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        sampled = np.flatnonzero(self.loss_mask)
        return int(sampled[0]) if sampled.size else len(self.token_ids)
