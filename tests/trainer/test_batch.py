"""Trials to rows and rows to advantages: placeholders, provenance of versions, one vote per trial."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from legorl.config.compose import compose
from legorl.proxy.row import Row
from legorl.trial.record import TrialRecord

batch = pytest.importorskip("legorl.trainer.batch", reason="needs the cpu extra")

pytestmark = pytest.mark.integration


def record(name: str, reward: float | None = 1.0, group: str = "g", **fields: Any) -> TrialRecord:
    values: dict[str, Any] = {"termination": "submitted", "excluded": False} | fields
    return TrialRecord(
        id=name, task="t", group=group, split="train", step=1, harness="h", detail="", reward=reward, **values
    )


def row(prompt: int, reply: int, version: int = 3) -> Row:
    total = prompt + reply
    mask = np.arange(total) >= prompt
    return Row(
        trial="t",
        segment=0,
        thread="main",
        parent=None,
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        weight_version=np.where(mask, version, -1).astype(np.int32),
        routed_experts=np.ones((total - 1, 2, 1), dtype=np.uint8),
    )


SHAPE = batch.RoutingShape(2, 1)


def test_a_row_becomes_prompt_and_response() -> None:
    (out,) = batch.outputs(record("a"), [row(4, 3)], SHAPE, pad_id=0, step=1)
    assert (out.prompt_ids, out.response_ids) == ([0, 1, 2, 3], [4, 5, 6])
    assert out.response_mask == [1, 1, 1]
    assert out.response_logprobs == [-0.5] * 3
    assert out.routed_experts.shape == (6, 2, 1)
    assert (out.extra_fields["min_global_steps"], out.extra_fields["max_global_steps"]) == (3, 3)
    assert out.as_dict()["routed_experts"].shape[0] == 7


def test_tokens_between_replies_are_masked_and_have_no_nan() -> None:
    mixed = row(4, 5)
    mixed.loss_mask[6] = False
    mixed.logprobs[6] = np.nan
    (out,) = batch.outputs(record("a"), [mixed], SHAPE, pad_id=0, step=1)
    assert out.response_mask == [1, 1, 0, 1, 1]
    assert not any(math.isnan(value) for value in out.response_logprobs)


@pytest.mark.parametrize("rows", [[], [row(4, 3)]])
def test_an_excluded_trial_keeps_its_place_and_trains_nothing(rows: list[Row]) -> None:
    gone = record("a", None, termination="engine", excluded=True)
    (out,) = batch.outputs(gone, rows, SHAPE, pad_id=7, step=1)
    assert out.response_mask == [0]
    assert out.as_dict()["routed_experts"].shape == (2, 2, 1)


def test_a_moe_row_without_routing_is_refused() -> None:
    bare = row(4, 3)
    object.__setattr__(bare, "routed_experts", None)
    with pytest.raises(ValueError, match="no routing"):
        batch.outputs(record("a"), [bare], SHAPE, pad_id=0, step=1)


def advantages(trials: list[tuple[TrialRecord, list[int]]], padding: int = 0, **algo: Any) -> Any:
    """`trials`: record and trained tokens of each of its rows."""
    config = compose([f"algo.{key}={value}" for key, value in algo.items()])
    keys, pads, extra, tokens = [], [], [], []
    for number, (rec, rows) in enumerate(trials):
        for segment, count in enumerate(rows):
            keys.append(f"uid-{rec.group}_{number}_{segment}")
            pads.append(False)
            extra.append({"legorl_record": rec.to_json()})
            tokens.append(count)
    for number in range(padding):
        keys.append(f"pad{number}_0_0")
        pads.append(True)
        extra.append(extra[0])
        tokens.append(0)
    return batch.advantages(keys, pads, extra, tokens, config.algo, config.filter, seed=0, step=1)


def test_each_trial_has_one_vote_whatever_its_rows_and_the_padding() -> None:
    result = advantages([(record("a", 1.0), [10, 30]), (record("b", 0.0), [5])], padding=3)
    votes = {"a": result.per_row[0] + result.per_row[1], "b": result.per_row[2]}
    assert votes["a"] == pytest.approx(-votes["b"])
    assert result.per_row[1] == pytest.approx(3 * result.per_row[0])
    assert not result.per_row[3:].any()
    assert sum(abs(v) for v in votes.values()) / len(result.per_row) == pytest.approx(np.sqrt(0.5), rel=1e-4)


def test_an_excluded_trial_is_in_no_mean() -> None:
    lost = record("c", None, termination="sandbox_start", excluded=True)
    two = [(record("a", 1.0), [4]), (record("b", 0.0), [4])]
    with_it = advantages([*two, (lost, [0])])
    without = advantages(two)
    scale = len(with_it.per_row) / len(without.per_row)
    assert with_it.per_row[:2] == pytest.approx(without.per_row * scale)
    assert with_it.per_row[2] == 0


def test_shuffled_rewards_keep_their_sum_and_lose_their_trials() -> None:
    trials = [(record(str(i), float(i < 4), group=str(i // 4)), [4]) for i in range(16)]
    true, control = advantages(trials), advantages(trials, shuffle_rewards=True)
    assert not np.allclose(true.per_row, control.per_row)
    assert [r.reward for r in control.records] == [r.reward for r in true.records]
