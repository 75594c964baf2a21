"""From what an engine answered to a `Sample`: every check that does not depend on the engine's kind.

Invariant (I1): an answer that lacks an id, a log-probability, a version or a routing row is an error here and
never a `Sample`; nothing is filled in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legorl.engine.base import Finish, Sample, Sampling
from legorl.errors import EngineError

MISSING_LOGPROB = -9999.0
"""What vLLM writes over HTTP where it has no log-probability."""
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


def assemble(
    engine: str,
    *,
    prompt_tokens: int,
    sampling: Sampling,
    token_ids: Sequence[int] | NDArray[np.int32],
    logprobs: Sequence[float] | NDArray[np.float32],
    weight_version: NDArray[np.int32],
    finish: str | None,
    routed_experts: NDArray[np.generic] | None,
    routed_from: int,
    routed: bool,
) -> Sample:
    """Check an answer and put it into numpy.

    Args:
        engine: names it in messages.
        prompt_tokens: P.
        sampling: as it was asked for.
        token_ids: [n].
        logprobs: [n].
        weight_version: [n].
        finish: vLLM's word for why sampling stopped.
        routed_experts: uint8 or uint16 [P + n - 1 - routed_from, L, K], or None.
        routed_from: position of its first row.
        routed: whether rows must be there.

    Raises:
        EngineError: something is missing or does not fit.
    """
    if finish not in _FINISHES:
        raise EngineError(f"{engine} ended a reply with {finish!r}; its log says why.")
    ids = np.asarray(token_ids, dtype=np.int32)
    scores = np.asarray(logprobs, dtype=np.float32)
    if not len(ids) == len(scores) == len(weight_version):
        raise EngineError(
            f"{engine} returned {len(ids)} tokens, {len(scores)} log-probabilities and "
            f"{len(weight_version)} weight versions for one reply."
        )
    if len(ids) > sampling.max_tokens:
        raise EngineError(f"{engine} returned {len(ids)} tokens, {sampling.max_tokens} were asked for.")
    if not np.isfinite(scores).all() or (scores <= MISSING_LOGPROB).any():
        raise EngineError(f"{engine} returned a token without its log-probability.")
    if (weight_version < 0).any():
        raise EngineError(f"{engine} returned a token without its weight version.")
    reason = _FINISHES[finish]
    if reason is not Finish.ABORT:
        rows = prompt_tokens + len(ids) - 1 - routed_from
        _check_routing(engine, routed_experts, rows, routed)
    return Sample(
        token_ids=ids,
        logprobs=scores,
        weight_version=weight_version.astype(np.int32, copy=False),
        finish=reason,
        routed_experts=routed_experts,  # type: ignore[arg-type]
        routed_start=routed_from,
    )


def aborted(routed_from: int) -> Sample:
    """What is left of a request that was stopped: nothing."""
    return Sample(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        weight_version=np.empty(0, np.int32),
        finish=Finish.ABORT,
        routed_start=routed_from,
    )


def _check_routing(engine: str, rows: NDArray[np.generic] | None, expected: int, routed: bool) -> None:
    if rows is None:
        if routed and expected > 0:
            raise EngineError(
                f"{engine} returned no routed experts: start it with --enable-return-routed-experts, or set "
                "backend.router_replay=false for a dense policy."
            )
        return
    if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16):
        raise EngineError(
            f"{engine} returned routed experts as {rows.dtype} of shape {rows.shape}; uint8 or uint16 "
            "[rows, layers, experts per token] was expected."
        )
    if len(rows) != expected:
        raise EngineError(f"{engine} returned {len(rows)} routing rows, {expected} were expected.")
