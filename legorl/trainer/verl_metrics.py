"""verl's metric names in this project's, and the agreement of engine and trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_NAMES = {
    "actor/entropy": "policy/entropy",
    "actor/ppo_kl": "policy/kl",
    "actor/pg_clipfrac": "policy/clip_fraction",
    "actor/grad_norm": "policy/grad_norm",
    "actor/pg_loss": "policy/loss",
    "actor/lr": "policy/learning_rate",
    "training/rollout_actor_probs_pearson_corr": "alignment/pearson",
    "training/off_policy/trajectory_staleness_worst/max": "staleness/max",
    "training/off_policy/trajectory_staleness_worst/mean": "staleness/mean",
}
_TIMES = {
    "step": "time_s/step",
    "gen": "time_s/generate",
    "old_log_prob": "time_s/old_logprob",
    "update_actor": "time_s/update",
    "update_weights": "time_s/sync",
}
_OWN = ("alignment/", "groups/")


def translate(metrics: Mapping[str, Any], timing: Mapping[str, float]) -> dict[str, float]:
    """The part of verl's step metrics that is tracked; what verl did not report is absent."""
    translated = {ours: float(metrics[theirs]) for theirs, ours in _NAMES.items() if theirs in metrics}
    translated |= {name: float(value) for name, value in metrics.items() if name.startswith(_OWN)}
    translated |= {ours: float(timing[theirs]) for theirs, ours in _TIMES.items() if theirs in timing}
    return translated


def alignment(data: Any, masks: Sequence[torch.Tensor]) -> dict[str, float]:
    """Agreement at the trained tokens before the update.

    Args:
        data: nested `rollout_log_probs` (engine) and `old_log_probs` (trainer), [rows, j].
        masks: [rows] of [j] bool, the trained tokens.

    Returns:
        Mean and largest absolute difference in nats, and the k3 estimate of KL(engine || trainer)
        (Schulman 2020, "Approximating KL divergence").
    """
    rows = zip(data["rollout_log_probs"].unbind(), data["old_log_probs"].unbind(), masks, strict=True)
    difference = torch.cat([(trainer - engine)[mask].double() for engine, trainer, mask in rows])
    if not len(difference):
        return {}
    return {
        "alignment/mean_abs": float(difference.abs().mean()),
        "alignment/max_abs": float(difference.abs().max()),
        "alignment/k3_kl": float((difference.exp() - 1 - difference).mean()),
    }
