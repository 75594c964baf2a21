"""Token in, token out: the only thing the rest of the system knows about an inference engine.

Invariant (I1): what a `Sample` holds came out of the engine; nothing in it was re-tokenised or re-scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Finish(StrEnum):
    """Why sampling stopped."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, set by the run and never by the harness."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256


@dataclass(frozen=True)
class Sample:
    """One reply of the engine. n sampled tokens; L routed layers, K experts per token."""

    token_ids: NDArray[np.int32]
    """[n], the end-of-turn token included when the policy sampled it."""
    logprobs: NDArray[np.float32]
    """[n], natural log, at the run's temperature."""
    weight_version: NDArray[np.int32]
    """[n], policy version that sampled each token."""
    finish: Finish
    routed_experts: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[rows, L, K]: row r is the forward pass at absolute position `routed_start + r`; the last sampled
    token has none. None for a dense policy."""
    routed_start: int = 0


class TokenEngine(Protocol):
    """An inference engine."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: Sampling,
        *,
        routed_from: int = 0,
        sticky: str = "",
    ) -> Sample:
        """Sample a continuation.

        Args:
            request_id: unique; `abort` takes it.
            prompt_ids: the whole context, [P].
            sampling: as the run says.
            routed_from: rows of the prompt below this position are not wanted (they are known already).
            sticky: requests with the same value go to the same engine (prefix cache).

        Raises:
            EngineError: dead, unreachable or out of time.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a running request; unknown ids are fine."""

    async def close(self) -> None:
        """Release it."""


@dataclass(frozen=True)
class ToolCall:
    """A call the policy made: name and the raw argument text as sampled."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """A reply taken apart. Text before the calls, the calls in order, reasoning where a parser found some."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class ReplyParser(Protocol):
    """Takes a sampled reply apart (vLLM's parsers, by name, implement this in `engine/vllm_parser.py`)."""

    def parse(self, text: str) -> Parsed:
        """`text` is the reply decoded with special tokens kept out; malformed calls stay text."""
