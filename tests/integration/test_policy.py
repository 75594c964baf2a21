"""Transcripts captured through the real harness, proxy and sandbox, and a policy warm-started on them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.compose import compose
from legorl.config.schema import Config, ModelConfig
from legorl.engine.vllm_parser import vllm_parser
from legorl.harness.registry import get_harness
from legorl.policy.build import build_policy
from legorl.policy.capture import HarnessCapture
from legorl.policy.expert import Mode
from legorl.policy.tokenizer import corpus, save_tokenizer, train_tokenizer
from legorl.tasks.pool import Pool
from legorl.tasks.synth import synth
from tests.policy.simulator import draft, run_episode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return synth("repair", 0, 4, 1, tmp_path_factory.mktemp("pools") / "repair")


@pytest.fixture
def config() -> Config:
    config = compose()
    get_harness(config.harness).install(Path(config.paths.cache))
    return config


def test_captured_transcripts_are_what_the_simulator_says(config: Config, pool: Pool, tmp_path: Path) -> None:
    """The simulator stands for the harness in fast tests, so it must show the policy the same text."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    tasks = pool.tasks("train")
    save_tokenizer(train_tokenizer(corpus(task.instruction for task in tasks), 768), model_dir, 16384)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    capture = HarnessCapture(config, tasks, tmp_path / "run", lambda path: vllm_parser(ModelConfig(), path))
    seen: list[tuple[int, int]] = []
    for mode in (Mode.SLOPPY, Mode.SKILL):
        transcripts = capture(model_dir, mode, len(tasks), lambda done, total: seen.append((done, total)))
        assert [transcript.mode for transcript in transcripts] == [mode] * len(tasks)
        for task, transcript in zip(tasks, transcripts, strict=True):
            text = tokenizer.decode(transcript.token_ids.tolist(), skip_special_tokens=False)
            replies = re.findall(r"assistant\n(<tool_call>\n.*?\n</tool_call>)", text)
            said = iter(replies)
            number = int(task.id.rsplit("-", 1)[1])
            episode = run_episode(
                draft(number), lambda *_, said=said: next(said), random.Random(), len(replies)
            )
            assert text == episode.text
            ids = [
                (token, by_policy)
                for piece, by_policy in episode.written
                for token in tokenizer.encode(piece, add_special_tokens=False).ids
            ]
            assert list(zip(transcript.token_ids.tolist(), transcript.loss_mask.tolist(), strict=True)) == ids
    assert seen.count((len(tasks), len(tasks))) == 2


def test_a_policy_is_built_from_real_trials(config: Config, pool: Pool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config.model.warm_start.episodes, config.model.warm_start.steps, config.model.warm_start.batch = 4, 2, 2
    tasks = pool.tasks("train")
    capture = HarnessCapture(
        compose(), tasks, tmp_path / "run", lambda path: vllm_parser(ModelConfig(), path)
    )
    config.paths.cache = str(tmp_path / "cache")  # of the policy; the harness stays where it is installed
    said: list[str] = []
    path = build_policy(config, pool, capture, lambda what, done, total: said.append(what))
    assert list(dict.fromkeys(said)) == ["capture sloppy", "capture skill", "warm start"]
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters()) > 10**6
    assert json.loads((path / "legorl.json").read_text())["pool"] == pool.manifest.hash
