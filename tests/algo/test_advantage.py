"""Advantages and row weights: the properties behind I4 and I5."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.algo.advantage import row_weights, shuffled, trial_advantages


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[str], list[bool]]:
    n = draw(st.integers(1, 24))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=n, max_size=n))
    groups = draw(st.lists(st.sampled_from("abcd"), min_size=n, max_size=n))
    kept = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return rewards, groups, kept


def test_the_numbers_of_verl() -> None:
    """torch.std (ddof 1) of [1, 0, 0, 0] is 0.5; verl's eps is added to it."""
    got = trial_advantages([1, 0, 0, 0], list("aaaa"), [True] * 4, normalize_by_std=True, eps=1e-6)
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-12)


def test_without_std_it_is_the_centred_reward() -> None:
    got = trial_advantages([1, 0, 1, 1], list("aabb"), [True] * 4, normalize_by_std=False)
    np.testing.assert_array_equal(got, [0.5, -0.5, 0.0, 0.0])


@pytest.mark.integration  # importing verl takes ten seconds
def test_agrees_with_verl() -> None:
    torch = pytest.importorskip("torch")
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    random = np.random.default_rng(0)
    rewards = random.integers(0, 2, 32).astype(float)
    groups = np.array([f"g{i // 8}" for i in range(32)], dtype=object)
    for normalize in (True, False):
        verl, _ = core.compute_grpo_outcome_advantage(
            torch.tensor(rewards, dtype=torch.float64)[:, None],
            torch.ones(32, 1, dtype=torch.float64),
            groups,
            norm_adv_by_std_in_grpo=normalize,
        )
        ours = trial_advantages(rewards, list(groups), [True] * 32, normalize_by_std=normalize)
        np.testing.assert_allclose(ours, verl[:, 0].numpy(), rtol=1e-9, atol=1e-12)


@given(batches(), st.booleans(), st.randoms(use_true_random=False))
def test_excluded_values_do_not_matter(batch, normalize, random) -> None:  # type: ignore[no-untyped-def]
    rewards, groups, kept = batch
    other = [r if k else random.choice([float("nan"), 1e9, -3.0]) for r, k in zip(rewards, kept, strict=True)]
    one = trial_advantages(rewards, groups, kept, normalize_by_std=normalize)
    two = trial_advantages(other, groups, kept, normalize_by_std=normalize)
    np.testing.assert_array_equal(one, two)
    assert not one[~np.array(kept)].any()


@given(batches(), st.booleans())
def test_centred_and_zero_without_variance(batch, normalize) -> None:  # type: ignore[no-untyped-def]
    rewards, groups, kept = batch
    got = trial_advantages(rewards, groups, kept, normalize_by_std=normalize)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group and kept[i]]
        assert abs(got[members].sum()) < 1e-9
        if len({rewards[i] for i in members}) <= 1:
            assert not got[members].any()
        else:
            best = max(members, key=lambda i: rewards[i])
            assert got[best] > 0


@given(batches(), st.booleans(), st.randoms(use_true_random=False))
def test_order_does_not_matter(batch, normalize, random) -> None:  # type: ignore[no-untyped-def]
    rewards, groups, kept = (np.array(part) for part in batch)
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = trial_advantages(rewards, list(groups), kept, normalize_by_std=normalize)
    permuted = trial_advantages(rewards[order], list(groups[order]), kept[order], normalize_by_std=normalize)
    np.testing.assert_allclose(straight[order], permuted, atol=1e-9)


def test_a_kept_trial_without_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="no finite reward"):
        trial_advantages([float("nan"), 1.0], ["a", "a"], [True, True], normalize_by_std=True)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[int]], list[bool]]:
    """Trained tokens of each row of each trial, and which trials are kept."""
    trials = draw(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=8))
    kept = draw(st.lists(st.booleans(), min_size=len(trials), max_size=len(trials)))
    return trials, kept


@given(splits(), st.integers(0, 2**31))
def test_the_mean_over_rows_is_the_mean_over_kept_trials(split, seed) -> None:  # type: ignore[no-untyped-def]
    trials, kept = split
    random = np.random.default_rng(seed)
    losses = [[random.normal(size=n) for n in rows] for rows in trials]
    rows = [row for rows in losses for row in rows]
    owner = [index for index, rows in enumerate(losses) for _ in rows]
    weights = row_weights([len(row) for row in rows], owner, kept)
    over_rows = np.mean([w * (row.mean() if len(row) else 0.0) for w, row in zip(weights, rows, strict=True)])
    votes = [np.concatenate(r).mean() for r, k in zip(losses, kept, strict=True) if k and sum(map(len, r))]
    assert over_rows == pytest.approx(np.mean(votes) if votes else 0.0, abs=1e-9)
    excluded = ~np.array(kept)[owner]
    assert not weights[excluded].any()


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.data())
def test_splitting_a_trial_into_rows_changes_nothing(tokens, data) -> None:  # type: ignore[no-untyped-def]
    """Each trial's share of the whole is the same whether its tokens lie in one row or in several."""
    whole = row_weights(tokens, range(len(tokens)), [True] * len(tokens))
    np.testing.assert_allclose(whole, 1.0)
    parts, owner = [], []
    for index, total in enumerate(tokens):
        cut = data.draw(st.integers(0, total))
        parts += [cut, total - cut]
        owner += [index, index]
    weights = row_weights(parts, owner, [True] * len(tokens))
    shares = np.bincount(owner, weights=weights) / len(parts)
    np.testing.assert_allclose(shares, 1 / len(tokens))


def test_nothing_kept_gives_zeros() -> None:
    np.testing.assert_array_equal(row_weights([3, 4], [0, 1], [False, False]), [0.0, 0.0])


@given(batches(), st.integers(0, 5), st.integers(0, 5))
def test_shuffled_permutes_kept_rewards_only(batch, seed, step) -> None:  # type: ignore[no-untyped-def]
    rewards, _, kept = batch
    got = shuffled(rewards, kept, seed, step)
    mask = np.array(kept)
    np.testing.assert_array_equal(got, shuffled(rewards, kept, seed, step))
    np.testing.assert_array_equal(got[~mask], np.array(rewards)[~mask])
    assert sorted(got[mask]) == sorted(np.array(rewards)[mask])


def test_shuffled_differs_between_steps() -> None:
    rewards = np.arange(64.0)
    one, two = (shuffled(rewards, [True] * 64, 0, step) for step in (1, 2))
    assert (one != rewards).any() and (one != two).any()
