"""From a ledger to what the record and the behaviour need: plain counts and the agent's steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from legorl.harness.base import ThreadKind
from legorl.proxy.echoes import Turn
from legorl.proxy.messages import Role
from legorl.proxy.row import Row
from legorl.proxy.transcript import Transcript
from legorl.trial.behaviour import Step


@dataclass(frozen=True)
class Counts:
    """Numbers of a trial's record, named as there."""

    turns: int
    prompt_tokens: int
    sampled_tokens: int
    rows: int
    weight_version_min: int
    weight_version_max: int
    routing_coverage: float | None


def steps_of(ledger: Transcript, *, main_only: bool = True) -> list[Step]:
    """Tool calls of the main thread, or of all, with their results, in the order in which they were sampled.

    Orphans are left out: the harness never acted on them. Arguments that are no JSON object give a step
    without arguments.
    """
    results: dict[str, str] = {}
    for node in ledger.nodes:
        if node.message is not None and node.message.role is Role.TOOL:
            results.setdefault(node.message.call_id, node.message.text)
    turns = _main_turns(ledger) if main_only else [turn for turn in ledger.turns if not turn.orphan]
    return [
        Step(call.name, _arguments(call.arguments), results.get(call.id, ""), number)
        for number, turn in enumerate(turns, 1)
        for call in turn.message.calls
    ]


def _main_turns(ledger: Transcript) -> list[Turn]:
    main = {name for name, thread in ledger.threads.items() if thread.kind is ThreadKind.MAIN}
    return [turn for turn in ledger.turns if turn.segment.thread in main and not turn.orphan]


def _arguments(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def count(ledger: Transcript | None, rows: Sequence[Row]) -> Counts:
    """Counts over the main thread's turns and the rows that train."""
    turns = [] if ledger is None else _main_turns(ledger)
    versions = [row.weight_version[row.loss_mask] for row in rows]
    seen = np.concatenate(versions) if versions else np.empty(0, np.int32)
    return Counts(
        turns=len(turns),
        prompt_tokens=sum(row.prompt_length for row in rows),
        sampled_tokens=0 if ledger is None else ledger.sampled_tokens,
        rows=len(rows),
        weight_version_min=int(seen.min()) if seen.size else -1,
        weight_version_max=int(seen.max()) if seen.size else -1,
        routing_coverage=_coverage(rows),
    )


def _coverage(rows: Sequence[Row]) -> float | None:
    """Share of trained tokens whose forward pass (one position before) has a routing row."""
    covered = trained = 0
    for row in rows:
        if row.routed_mask is None:
            continue
        at = np.flatnonzero(row.loss_mask)
        at = at[at > 0]
        trained += len(at)
        covered += int(np.count_nonzero(row.routed_mask[at - 1]))
    return covered / trained if trained else None
