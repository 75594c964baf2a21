"""Group-relative advantages over trials, and the weight of each row (numpy, no torch).

Invariants: a trial that is not kept is in no mean, no standard deviation and no weight (I5); every kept
trial has one vote in the loss, whether its history gave one row or five (I4).

verl computes GRPO advantages over *rows*, which would count a trial with five rows five times in its own
baseline; here the unit is the trial, and rows inherit its value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def trial_advantages(
    rewards: ArrayLike,
    groups: Sequence[Hashable],
    kept: ArrayLike,
    *,
    normalize_by_std: bool,
    eps: float = 1e-6,
) -> NDArray[np.float64]:
    """Reward minus the group's mean, over the group's standard deviation if asked.

    The conventions are those of verl's `compute_grpo_outcome_advantage`: the sample standard deviation
    (ddof 1), `eps` added to it. It differs in one case: a lone trial, which verl gives its own reward, has
    nothing to be compared with and gets 0.

    Args:
        rewards: [n], float; the values of trials that are not kept are never looked at (NaN is fine).
        groups: [n]; trials with equal entries are one group.
        kept: [n], bool.
        normalize_by_std: divide by the standard deviation (GRPO) or not (Dr. GRPO).
        eps: added to the standard deviation.

    Returns:
        [n] advantages; 0 where not kept and in groups without variance.

    Raises:
        ValueError: lengths differ, or a kept trial's reward is not finite.
    """
    values = np.asarray(rewards, dtype=np.float64)
    mask = np.asarray(kept, dtype=np.bool_)
    if not len(values) == len(groups) == len(mask):
        raise ValueError(f"{len(values)} rewards, {len(groups)} groups and {len(mask)} kept flags.")
    if not np.all(np.isfinite(values[mask])):
        raise ValueError("A kept trial has no finite reward; only graded trials can be kept.")
    members: dict[Hashable, list[int]] = {}
    for index in np.flatnonzero(mask):
        members.setdefault(groups[index], []).append(int(index))
    advantages = np.zeros(len(values))
    for indices in members.values():
        scores = values[indices]
        if len(indices) < 2 or np.all(
            scores == scores[0]
        ):  # an exact zero, whatever the rounding of the mean
            continue
        centred = scores - scores.mean()
        advantages[indices] = centred / (scores.std(ddof=1) + eps) if normalize_by_std else centred
    return advantages


def row_weights(tokens_per_row: ArrayLike, trial_of_row: ArrayLike, kept: ArrayLike) -> NDArray[np.float64]:
    """Factors that turn a mean over rows into a mean over kept trials.

    With verl's `seq-mean-token-mean` a row's loss is the mean over its trained tokens and the batch's loss
    the mean over its n_rows rows. Multiplying row r's advantage by w[r] makes the batch's loss

        mean over kept trials of (mean over all trained tokens of the trial)

    because w[r] = n_rows / n_kept * tokens[r] / tokens of r's trial. One row per trial, all kept: all ones.

    Args:
        tokens_per_row: [n_rows], number of trained tokens (loss mask 1).
        trial_of_row: [n_rows], index into `kept`.
        kept: [n_trials], bool.

    Returns:
        [n_rows]; 0 for rows of trials that are not kept and for rows without trained tokens. A kept trial
        without any trained token cannot vote and does not count in n_kept.
    """
    tokens = np.asarray(tokens_per_row, dtype=np.float64)
    trials = np.asarray(trial_of_row, dtype=np.int64)
    mask = np.asarray(kept, dtype=np.bool_)
    if tokens.shape != trials.shape:
        raise ValueError(f"{len(tokens)} rows, but the trial of {len(trials)} rows.")
    counted = np.where(mask[trials], tokens, 0.0)
    per_trial = np.bincount(trials, weights=counted, minlength=len(mask))
    voters = int(np.count_nonzero(per_trial))
    if voters == 0:
        return np.zeros(len(tokens))
    share: NDArray[np.float64] = counted / np.maximum(per_trial[trials], 1.0)
    return share * (len(tokens) / voters)


def shuffled(rewards: ArrayLike, kept: ArrayLike, seed: int, step: int) -> NDArray[np.float64]:
    """The control experiment: kept trials' rewards permuted over the batch, determined by seed and step.

    The permutation crosses groups and leaves the batch's mean as it is, so only the link between what a
    trial did and what it got is cut. Entries that are not kept stay where they are.
    """
    values = np.asarray(rewards, dtype=np.float64).copy()
    indices = np.flatnonzero(np.asarray(kept, dtype=np.bool_))
    values[indices] = values[np.random.default_rng([seed, step]).permutation(indices)]
    return values
