"""Invariants I1 to I4 of the design, as executable checks on what a trial recorded.

A violation is a sentence; a trial with any is excluded as a failure of the proxy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from legorl.proxy.row import Row
from legorl.proxy.segment import digest
from legorl.proxy.transcript import Transcript


def check(record: Transcript | Sequence[Row]) -> list[str]:
    """Every violation found in a ledger (all threads) or in rows of one trial; empty when all hold."""
    if isinstance(record, Transcript):
        rows = record.rows(tuple(record.threads))
        return [*_check_rows(rows), *_check_ledger(record, rows)]
    return list(_check_rows(record))


def row_weights(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Share of each row in its trial's one vote (I4): its part of the trial's loss tokens. [len(rows)]."""
    counts = np.array([row.loss_mask.sum() for row in rows], dtype=np.float64)
    return counts / counts.sum() if counts.sum() else counts


def _check_rows(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield from (f"segment {row.segment}: {violation}" for violation in _check_row(row))
    for call, count in Counter(call.id for row in rows for call in row.calls).items():
        if count > 1:
            yield f"I2: call {call} is in {count} rows"
    if len({row.trial for row in rows}) > 1:
        yield "I4: rows of several trials were checked as one"
    if len({row.segment for row in rows}) != len(rows):
        yield "I4: a segment gave more than one row"
    if rows and not np.isclose(row_weights(rows).sum(), 1.0):
        yield "I4: the rows' weights do not add up to one vote"


def _check_row(row: Row) -> Iterator[str]:
    mask, length = row.loss_mask, len(row.token_ids)
    if any(len(a) != length for a in (mask, row.logprobs, row.weight_version)):
        yield "I1: arrays of different lengths"
        return
    if not mask.any():
        yield "I4: a row without a loss token"
    if not np.isfinite(row.logprobs[mask]).all():
        yield "I1: a loss token without a log-probability"
    if (row.logprobs[mask] > 1e-4).any():
        yield "I1: a log-probability above zero"
    if (row.weight_version[mask] < 0).any():
        yield "I1: a loss token without a weight version"
    if not np.isnan(row.logprobs[~mask]).all() or (row.weight_version[~mask] != -1).any():
        yield "I1: a context token with a log-probability or a weight version"
    covered = np.zeros(length, np.int32)
    for call in row.calls:
        covered[call.start : call.end] += 1
        if digest(row.token_ids[: call.start]) != call.prompt_digest:
            yield f"I3: the tokens before call {call.id} are not the prompt the engine saw"
        if digest(row.token_ids[call.start : call.end]) != call.sample_digest:
            yield f"I1: the tokens of call {call.id} are not those the engine sampled"
    if not np.array_equal(covered, mask.astype(np.int32)):
        yield "I1: loss tokens are not exactly those of the calls"
    if row.routed_experts is not None:
        yield from _check_routing(row)


def _check_routing(row: Row) -> Iterator[str]:
    assert row.routed_experts is not None
    if row.routed_mask is None or len(row.routed_mask) != len(row.token_ids) - 1:
        yield "I1: routing without a mask of its length"
    elif len(row.routed_experts) != len(row.token_ids) - 1:
        yield "I1: routing of a wrong length"
    elif not row.routed_mask[np.flatnonzero(row.loss_mask) - 1].all():
        yield "I1: a loss token whose routing row the engine did not report"


def _check_ledger(ledger: Transcript, rows: Sequence[Row]) -> Iterator[str]:
    trained = {call.id for row in rows for call in row.calls}
    for turn in ledger.turns:
        if turn.orphan and turn.id in trained:
            yield f"I2: call {turn.id} is an orphan ({turn.orphan}) and in a row"
        if not turn.orphan and turn.id not in trained:
            yield f"I2: call {turn.id} was received and is in no row"
    routed = [segment for segment in ledger.segments if segment.routing is not None]
    for segment in ledger.segments:
        if routed and segment.routing is None and segment.mask.view.any():
            yield f"I1: segment {segment.id} has no routing, others of the trial have"
    ids = [call.id for turn in ledger.turns for call in turn.message.calls]
    if len(set(ids)) != len(ids):
        yield "I2: a tool-call id was issued twice"
