"""The built policy: a complete Hugging Face directory, made once, never half."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from legorl.config.compose import compose
from legorl.config.schema import Config, ModelConfig, WarmStartConfig
from legorl.errors import InfrastructureError
from legorl.policy.build import build_policy, policy_path
from legorl.policy.expert import Mode
from legorl.policy.model import random_policy
from legorl.policy.template import render
from legorl.policy.tokenizer import BASH_TOOL
from legorl.policy.warm_start import Transcript
from legorl.tasks.draft import content_hash, write_task
from legorl.tasks.pool import Entry, Manifest, Pool
from tests.policy.simulator import draft

TINY = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "experts": 4,
    "expert_size": 16,
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    root = tmp_path_factory.mktemp("pool")
    entries = []
    for number in range(4):
        made = draft(number)
        write_task(made, root / made.id)
        checks = dict.fromkeys([f.name for f in dataclasses.fields(Entry) if f.type == "bool"], True)
        entries.append(
            Entry(
                id=made.id,
                path=made.id,
                content_hash=content_hash(root / made.id),
                source=made.source,
                repository=made.repository,
                module=made.module,
                split=made.split,
                runs=2,
                **checks,
            )
        )
    return Pool(root, Manifest("repair", 0, "", "test", 4, 0, "a" * 64), tuple(entries))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = compose()
    config.paths.cache = str(tmp_path / "cache")
    for name, value in TINY.items():
        setattr(config.model, name, value)
    config.model.warm_start = WarmStartConfig(episodes=6, steps=2, batch=2, skill_share=0.5)
    return config


class FakeCapture:
    """Transcripts of noise in the tokenizer's ids."""

    def __init__(self) -> None:
        self.asked: list[tuple[Mode, int]] = []

    def __call__(
        self, model_dir: Path, mode: Mode, episodes: int, progress: Callable[[int, int], None]
    ) -> list[Transcript]:
        self.asked.append((mode, episodes))
        size = Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
        progress(episodes, episodes)
        ids = np.random.default_rng(0).integers(0, size, (episodes, 9), np.int32)
        return [Transcript(row, np.arange(9) > 3, mode) for row in ids]


def test_it_is_built_once_from_both_kinds_of_transcripts(config: Config, pool: Pool) -> None:
    capture, said = FakeCapture(), []
    path = build_policy(config, pool, capture, lambda *what: said.append(what))
    assert path == policy_path(config, pool)
    assert capture.asked == [(Mode.SLOPPY, 3), (Mode.SKILL, 3)]
    assert ("warm start", 2, 2) in said and ("capture skill", 3, 3) in said
    assert build_policy(config, pool, capture) == path
    assert len(capture.asked) == 2
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_it_depends_on_is_in_its_name(config: Config, pool: Pool) -> None:
    path = policy_path(config, pool)
    config.harness.deadline_s += 1
    assert policy_path(config, pool) == path
    config.model.warm_start.seed += 1
    assert policy_path(config, pool) != path
    config.model.warm_start.seed -= 1
    other = dataclasses.replace(pool, manifest=dataclasses.replace(pool.manifest, hash="b" * 64))
    assert policy_path(config, other) != path


def test_a_failed_capture_leaves_nothing(config: Config, pool: Pool) -> None:
    def broken(*_: object) -> list[Transcript]:
        raise InfrastructureError("no sandbox")

    with pytest.raises(InfrastructureError, match="no sandbox"):
        build_policy(config, pool, broken)
    assert list((Path(config.paths.cache) / "policies").iterdir()) == []


def test_without_episodes_it_is_random(config: Config, pool: Pool) -> None:
    config.model.warm_start.episodes = 0
    capture = FakeCapture()
    path = build_policy(config, pool, capture)
    assert capture.asked == [] and (path / "model.safetensors").is_file()


@pytest.mark.parametrize("experts", [8, 0])
def test_transformers_loads_it(tmp_path: Path, experts: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = ModelConfig(name="tiny", experts=experts)
    path = random_policy(config, tmp_path / "policy", [draft(0).instruction])
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(tokenizer) == model.config.vocab_size == model.lm_head.weight.shape[0]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.architectures == ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"]
    assert json.loads((path / "config.json").read_text())["max_position_embeddings"] == config.max_positions

    talk = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": draft(0).instruction},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "bash", "arguments": {"command": "a < 'b'"}}}],
        },
        {"role": "tool", "content": "4 passed"},
    ]
    text = tokenizer.apply_chat_template(talk, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False)
    assert text == render(talk, [BASH_TOOL])
    theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (
        theirs == Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
