"""Builds the starting policy once and keeps it: tokenizer, transcripts through the harness, warm start.

Invariants: a policy directory is complete or absent (it is built beside its place and renamed); its name
holds the hash of everything that it depends on, so a stale policy is never used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.schema import Config, ModelConfig
from legorl.policy.expert import Mode
from legorl.policy.model import build_model, random_policy, save_policy
from legorl.policy.tokenizer import corpus, save_tokenizer, train_tokenizer
from legorl.policy.warm_start import Transcript, warm_start
from legorl.tasks.pool import Pool

MARK = "legorl.json"
"""File in a policy directory that says what it was made from."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done (`capture sloppy`, `capture skill`, `warm start`), done and total."""


class Capture(Protocol):
    """Where transcripts come from."""

    def __call__(
        self, model_dir: Path, mode: Mode, episodes: int, progress: Callable[[int, int], None]
    ) -> Sequence[Transcript]:
        """Run the expert in `mode` for `episodes` trials in the harness.

        Args:
            model_dir: tokenizer and chat template; the token ids of the result are of this tokenizer.
            mode: `SLOPPY` or `SKILL`; the kind of the transcripts.
            episodes: number of trials.
            progress: called with trials done and their total.

        Raises:
            InfrastructureError: an episode failed for good.
        """


def policy_path(config: Config, pool: Pool) -> Path:
    """Where the starting policy of this configuration and pool lies, built or not."""
    digest = hashlib.sha256(json.dumps(_ingredients(config, pool), sort_keys=True).encode()).hexdigest()
    return Path(config.paths.cache) / "policies" / f"{config.model.name}-{digest[:12]}"


def build_policy(
    config: Config, pool: Pool, capture: Capture, progress: Progress = lambda what, done, total: None
) -> Path:
    """Return the starting policy's directory; build it when it is not there.

    Without warm-start episodes it is a random policy and `capture` is not called.

    Raises:
        InfrastructureError: from `capture`.
        LegoError: the training diverged.
    """
    place = policy_path(config, pool)
    if (place / MARK).is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
        out = Path(scratch) / "policy"
        texts = list(corpus(task.instruction for task in pool.tasks("train")))
        if config.model.warm_start.episodes:
            tokenizer = train_tokenizer(texts, config.model.vocabulary)
            _warm(config.model, tokenizer, out, capture, progress)
        else:
            random_policy(config.model, out, texts, config.model.warm_start.seed)
        (out / MARK).write_text(json.dumps(_ingredients(config, pool), indent=2))
        shutil.rmtree(place, ignore_errors=True)  # of a build that was cut between files and mark: none is
        try:
            out.rename(place)
        except OSError:
            if not (place / MARK).is_file():  # another process built the same one meanwhile
                raise
    return place


def _warm(
    model_config: ModelConfig, tokenizer: Tokenizer, out: Path, capture: Capture, progress: Progress
) -> None:
    config = model_config.warm_start
    out.mkdir()
    save_tokenizer(tokenizer, out, model_config.max_positions)
    skill = round(config.episodes * config.skill_share)
    transcripts: list[Transcript] = []
    for mode, episodes in ((Mode.SLOPPY, config.episodes - skill), (Mode.SKILL, skill)):
        if episodes:

            def captured(done: int, total: int, what: str = f"capture {mode}") -> None:
                progress(what, done, total)

            transcripts += capture(out, mode, episodes, captured)
    model = build_model(model_config, tokenizer, config.seed)
    warm_start(
        model,
        tokenizer,
        transcripts,
        config,
        progress=lambda done, total, loss: progress("warm start", done, total),
    )
    save_policy(model, tokenizer, model_config, out)


def _ingredients(config: Config, pool: Pool) -> dict[str, object]:
    sources = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(file.read_bytes())
    return {
        "model": dataclasses.asdict(config.model),
        "harness": {
            "name": config.harness.name,
            "profile": config.harness.profile,
            "turn_limit": config.harness.turn_limit,
        },
        "pool": pool.manifest.hash,
        "sources": sources.hexdigest(),
    }
