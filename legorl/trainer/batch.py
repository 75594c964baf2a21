"""Between trials and verl's batches: a trial's rows as agent-loop outputs, a batch's advantages over trials.

Invariants: an excluded trial keeps its place in the batch as one placeholder row without any trained token
(I5); advantages are computed once per trial and each trial has one vote in the loss (I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from legorl.algo.advantage import row_weights, shuffled, trial_advantages
from legorl.config.schema import AlgoConfig, FilterConfig
from legorl.filter.admission import StepAdmission, admit
from legorl.proxy.row import Row
from legorl.trial.record import TrialRecord


@dataclass(frozen=True)
class RoutingShape:
    """Layers and experts per token of a MoE policy."""

    layers: int
    experts_per_token: int


def placeholder(record: TrialRecord, routing: RoutingShape | None, pad_id: int, step: int) -> AgentLoopOutput:
    """One row that trains nothing; it carries the record of an excluded or a held-out trial."""
    experts = None
    if routing is not None:
        experts = np.zeros((2, routing.layers, routing.experts_per_token), dtype=np.int16)
    return _output(
        record, [pad_id], [pad_id], [0], [0.0], experts, reward=record.reward or 0.0, versions=(step, step)
    )


def outputs(
    record: TrialRecord, rows: Sequence[Row], routing: RoutingShape | None, pad_id: int, step: int
) -> list[AgentLoopOutput]:
    """A trial's rows for verl, in order; a placeholder when it has none to train."""
    trained = [row for row in rows if row.loss_mask.any()]
    if record.excluded or not trained:
        return [placeholder(record, routing, pad_id, step)]
    result = []
    for row in trained:
        start = row.prompt_length
        sampled = row.loss_mask[start:]
        experts = None
        if routing is not None:
            if row.routed_experts is None:
                raise ValueError(
                    f"Trial {row.trial}: no routing was recorded for a MoE policy; check engine.name."
                )
            experts = row.routed_experts.astype(np.int16)
        versions = row.weight_version[row.loss_mask]
        result.append(
            _output(
                record,
                row.token_ids[:start].tolist(),
                row.token_ids[start:].tolist(),
                sampled.astype(int).tolist(),
                np.where(sampled, row.logprobs[start:], 0.0).tolist(),
                experts,
                reward=record.reward or 0.0,
                versions=(int(versions.min()), int(versions.max())),
            )
        )
    return result


def _output(
    record: TrialRecord,
    prompt: list[int],
    response: list[int],
    mask: list[int],
    logprobs: list[float],
    experts: NDArray[np.int16] | None,
    *,
    reward: float,
    versions: tuple[int, int],
) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=logprobs,
        routed_experts=experts,
        reward_score=reward,
        num_turns=record.turns,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "legorl_record": record.to_json(),
            "min_global_steps": versions[0],
            "max_global_steps": versions[1],
            "reward_extra_info": {},
        },
    )


@dataclass(frozen=True)
class BatchAdvantages:
    """What the update of one batch uses."""

    records: tuple[TrialRecord, ...]
    """One per trial, in order of first appearance."""
    admission: StepAdmission
    per_row: NDArray[np.float64]
    """[rows], the advantage of every trained token of a row, weight included; 0 for padding rows."""


def advantages(
    keys: Sequence[str],
    padding: Sequence[bool],
    extra_fields: Sequence[dict[str, Any]],
    trained_tokens: Sequence[int],
    algo: AlgoConfig,
    filter_config: FilterConfig,
    *,
    seed: int,
    step: int,
) -> BatchAdvantages:
    """Advantages of a batch of rows.

    Args:
        keys: verl's row keys `{prompt uid}_{session}_{segment}`.
        padding: rows that verl added to fill a mini-batch.
        extra_fields: of each row, as `outputs` made them.
        trained_tokens: [rows], loss-mask tokens of each row.
        algo, filter_config: as configured.
        seed, step: for the shuffled-rewards control.
    """
    trial_of_row: list[int] = []
    index: dict[str, int] = {}
    records: list[TrialRecord] = []
    for key, is_padding, extra in zip(keys, padding, extra_fields, strict=True):
        session = key.rsplit("_", 1)[0]
        if not is_padding and session not in index:
            index[session] = len(records)
            records.append(TrialRecord.from_json(extra["legorl_record"]))
        trial_of_row.append(-1 if is_padding else index[session])

    judged = records
    if algo.shuffle_rewards:
        counted = [trial.counted for trial in admit(records, filter_config).trials]
        rewards = shuffled([np.nan if r.reward is None else r.reward for r in records], counted, seed, step)
        judged = [
            replace(record, reward=float(reward)) if ok else record
            for record, reward, ok in zip(records, rewards, counted, strict=True)
        ]
    admission = admit(judged, filter_config)
    kept = [trial.kept for trial in admission.trials]
    per_trial = trial_advantages(
        [np.nan if record.reward is None else record.reward for record in judged],
        [record.group for record in judged],
        kept,
        normalize_by_std=algo.normalize_by_std,
    )
    rows = np.asarray(trial_of_row)
    real = rows >= 0
    tokens = np.where(real, np.asarray(trained_tokens), 0)
    weights = row_weights(tokens, np.maximum(rows, 0), kept)
    per_row = np.where(real, per_trial[np.maximum(rows, 0)] * weights, 0.0)
    return BatchAdvantages(tuple(records), admission, per_row)
