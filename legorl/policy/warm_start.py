"""Supervised training of a tiny policy on captured transcripts of the scripted expert.

Invariant: in `skill` transcripts the deciding tokens (which command; tests or not) are not trained: they
teach how to go on after a red run without teaching whether, so the start keeps the sloppy expert's habits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.schema import WarmStartConfig
from legorl.errors import LegoError
from legorl.policy.commands import AND_TEST, EDIT_START, SUBMIT, TEST
from legorl.policy.expert import Mode

CONTEXT_WEIGHT = 0.2
"""Of the loss on tokens that were read and not written: reading is learned along with writing."""
IGNORED, READ, WRITTEN = 0, 1, 2
"""Part of a token in the loss."""
CHUNK = 8
"""Batches sorted by length together, so that little of a batch is padding."""

Progress = Callable[[int, int, float], None]
"""Called with steps done, steps in all, and the last loss on trained tokens."""


@dataclass(frozen=True)
class Transcript:
    """One captured row. T tokens."""

    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T]; True where the expert wrote the token."""
    mode: Mode
    """Of the expert."""


def warm_start(
    model: Any,
    tokenizer: Tokenizer,
    transcripts: Sequence[Transcript],
    config: WarmStartConfig,
    *,
    progress: Progress = lambda done, steps, loss: None,
    threads: int = 2,
) -> None:
    """Train `model` in place for `config.steps` batches of `config.batch` transcripts, in fp32.

    Raises:
        LegoError: no transcripts, or the loss stopped being a number.
    """
    import torch

    from legorl.policy.optimizer import MuonAdamW

    if not transcripts:
        raise LegoError("The warm start has no transcripts; capture some or set model.warm_start.episodes=0.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer = MuonAdamW(model, config.matrix_learning_rate, config.learning_rate, config.steps)
        batches = _batches(transcripts, _decisions(tokenizer), config)
        model.train()
        for done in range(1, config.steps + 1):
            written, loss = _losses(model, *next(batches))
            if not torch.isfinite(loss):
                raise LegoError(
                    f"The loss of the warm start is {loss.item()} at step {done}; lower "
                    "model.warm_start.learning_rate or model.warm_start.matrix_learning_rate."
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress(done, config.steps, written.item())
        model.eval()
    finally:
        torch.set_num_threads(before)


def _decisions(tokenizer: Tokenizer) -> NDArray[np.int32]:
    return np.array([tokenizer.token_to_id(text) for text in (EDIT_START, TEST, SUBMIT, AND_TEST)], np.int32)


def _batches(
    transcripts: Sequence[Transcript], decisions: NDArray[np.int32], config: WarmStartConfig
) -> Iterator[tuple[Any, Any]]:
    """Endless batches: token ids int64[B, T] and their parts int64[B, T], padded with zeros on the right."""
    import torch

    rows = [np.stack([row.token_ids, _parts(row, decisions)]).astype(np.int64) for row in transcripts]
    rng = random.Random(config.seed)
    pending: list[NDArray[np.int64]] = []
    while True:
        while len(pending) < CHUNK * config.batch:
            pending += rng.sample(rows, len(rows))
        chunk, pending = pending[: CHUNK * config.batch], pending[CHUNK * config.batch :]
        chunk.sort(key=lambda row: row.shape[1])
        starts = list(range(0, len(chunk), config.batch))
        rng.shuffle(starts)
        for start in starts:
            batch = chunk[start : start + config.batch]
            padded = np.zeros((2, len(batch), batch[-1].shape[1]), np.int64)
            for i, row in enumerate(batch):
                padded[:, i, : row.shape[1]] = row
            yield torch.from_numpy(padded[0]), torch.from_numpy(padded[1])


def _parts(row: Transcript, decisions: NDArray[np.int32]) -> NDArray[np.int64]:
    parts = np.where(row.loss_mask, WRITTEN, READ)
    parts[0] = IGNORED  # nothing comes before it
    if row.mode is Mode.SKILL:
        parts[row.loss_mask & np.isin(row.token_ids, decisions)] = IGNORED
    return parts


def _losses(model: Any, ids: Any, parts: Any) -> tuple[Any, Any]:
    """Mean loss on written tokens, and that plus the weighted mean on read ones."""
    from torch.nn.functional import cross_entropy

    # Causal attention and padding on the right: no attention mask is needed.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets, parts = ids[:, 1:], parts[:, 1:]
    trained = parts != IGNORED
    losses = cross_entropy(model.lm_head(hidden[:, :-1][trained]), targets[trained], reduction="none")
    written = parts[trained] == WRITTEN
    on_written = losses[written].mean()
    return on_written, on_written + CONTEXT_WEIGHT * losses[~written].mean()
