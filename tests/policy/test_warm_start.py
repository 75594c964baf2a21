"""The warm start: what is trained, what is not, and that it learns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from legorl.config.schema import ModelConfig, WarmStartConfig
from legorl.errors import LegoError
from legorl.policy.commands import AND_TEST, EDIT_START, SUBMIT
from legorl.policy.expert import Expert, Mode
from legorl.policy.model import build_model
from legorl.policy.optimizer import orthogonalize
from legorl.policy.tokenizer import corpus, train_tokenizer
from legorl.policy.warm_start import (
    IGNORED,
    READ,
    WRITTEN,
    Transcript,
    _batches,
    _decisions,
    _parts,
    warm_start,
)
from tests.policy.simulator import draft, run_episode

TINY = ModelConfig(
    name="tiny", hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, experts=4, expert_size=16
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(corpus(draft(number).instruction for number in range(60)), 500)


def transcripts(tokenizer: Tokenizer, mode: Mode, count: int) -> list[Transcript]:
    rng = random.Random(0)
    made = []
    for number in range(count):
        ids: list[int] = []
        mask: list[bool] = []
        for piece, by_policy in run_episode(draft(number), Expert(mode), rng).written:
            tokens = tokenizer.encode(piece, add_special_tokens=False).ids
            ids += tokens
            mask += [by_policy] * len(tokens)
        made.append(Transcript(np.array(ids, np.int32), np.array(mask), mode))
    return made


def test_decisions_of_skill_transcripts_are_not_trained(tokenizer: Tokenizer) -> None:
    decisions = _decisions(tokenizer)
    skill = transcripts(tokenizer, Mode.SKILL, 1)[0]
    parts = _parts(skill, decisions)
    texts = np.array([tokenizer.decode([token], skip_special_tokens=False) for token in skill.token_ids])
    assert parts[0] == IGNORED
    assert set(texts[1:][parts[1:] == IGNORED]) == {EDIT_START, AND_TEST, SUBMIT}
    assert (parts[1:][~skill.loss_mask[1:]] == READ).all()
    written = set(texts[parts == WRITTEN])
    assert {"<tool_call>", "<|im_end|>", " @' "} <= written

    sloppy = _parts(Transcript(skill.token_ids, skill.loss_mask, Mode.SLOPPY), decisions)
    assert (sloppy == WRITTEN).sum() > (parts == WRITTEN).sum()
    assert (sloppy[1:] != IGNORED).all()


def test_an_epoch_holds_every_transcript_once(tokenizer: Tokenizer) -> None:
    rows = transcripts(tokenizer, Mode.SLOPPY, 32)
    stream = _batches(rows, _decisions(tokenizer), WarmStartConfig(batch=4))
    for _ in range(2):
        epoch = [next(stream) for _ in range(8)]
        seen = sorted(
            tuple(ids[parts.nonzero()[:, 0].unique()[i]][: len(row)].tolist())
            for ids, parts in epoch
            for i, row in enumerate(ids)
        )
        lengths = sorted(int((parts[i] != IGNORED).sum()) + 1 for _, parts in epoch for i in range(4))
        assert len(seen) == 32
        assert lengths == sorted(len(row.token_ids) for row in rows)
    padding = sum(int((parts[:, 1:] == IGNORED).sum()) for _, parts in epoch)
    assert padding < 0.25 * sum(parts.numel() for _, parts in epoch)


def test_it_learns_to_write_like_the_expert(tokenizer: Tokenizer) -> None:
    rows = transcripts(tokenizer, Mode.SLOPPY, 40) + transcripts(tokenizer, Mode.SKILL, 20)
    model = build_model(TINY, tokenizer, 0)
    losses: list[float] = []
    config = WarmStartConfig(steps=30, batch=8, learning_rate=0.03, matrix_learning_rate=0.05)
    warm_start(
        model, tokenizer, rows, config, progress=lambda done, total, loss: losses.append(loss), threads=1
    )
    assert len(losses) == 30
    assert losses[0] > 5.5 and np.mean(losses[-5:]) < 2.5
    assert not model.training


def test_the_same_seed_gives_the_same_weights(tokenizer: Tokenizer) -> None:
    rows = transcripts(tokenizer, Mode.SLOPPY, 8)

    def trained() -> torch.Tensor:
        model = build_model(TINY, tokenizer, 3)
        warm_start(model, tokenizer, rows, WarmStartConfig(steps=2, batch=4), threads=1)
        return model.lm_head.weight.detach()

    torch.manual_seed(1)
    first = trained()
    torch.manual_seed(2)
    assert torch.equal(first, trained())


def test_divergence_is_an_error_and_so_is_nothing_to_learn_from(tokenizer: Tokenizer) -> None:
    rows = transcripts(tokenizer, Mode.SLOPPY, 4)
    model = build_model(TINY, tokenizer, 0)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(LegoError, match=r"step 1; lower model\.warm_start"):
        warm_start(model, tokenizer, rows, WarmStartConfig(steps=2, batch=4), threads=1)
    with pytest.raises(LegoError, match="no transcripts"):
        warm_start(model, tokenizer, [], WarmStartConfig(steps=2), threads=1)


@pytest.mark.parametrize("shape", [(3, 8, 4), (4, 9), (16, 16)])
def test_orthogonalize_makes_singular_values_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert values.min() > 0.3 and values.max() < 1.3
