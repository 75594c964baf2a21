"""Each rule across parameters refuses its case and names the keys."""

from __future__ import annotations

import copy
import functools
import math
import re

import pytest
from omegaconf import DictConfig, OmegaConf

from legorl.config import rules
from legorl.config.compose import compose, to_config
from legorl.config.keys import schema_keys
from legorl.config.ranges import RANGES
from legorl.errors import UserError


@pytest.fixture(scope="module")
def default() -> DictConfig:
    """The default tree; composing it anew for each case would take most of the time."""
    tree = OmegaConf.structured(compose())
    assert isinstance(tree, DictConfig)
    return tree


def check(default: DictConfig, overrides: list[str]) -> None:
    merged = OmegaConf.merge(default, OmegaConf.from_dotlist(overrides))
    assert isinstance(merged, DictConfig)
    rules.check(to_config(merged))


def test_the_default_holds_every_rule(default: DictConfig) -> None:
    check(default, [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.group_size=1"], "algo.group_size=1: .* at least 2"),
        (["run.heldout_tasks=65"], "run.heldout_tasks=65 exceeds tasks.heldout=64"),
        (["algo.tasks_per_step=8", "tasks.train=4"], "algo.tasks_per_step=8 exceeds tasks.train=4"),
        (["algo.minibatches=7"], "groups do not split into algo.minibatches=7"),
        (
            ["engine.reply_tokens=16384", "engine.trial_tokens=20000"],
            "must be below engine.max_model_len=16384",
        ),
        (["engine.trial_tokens=10"], "less than one reply"),
        (["engine.max_model_len=20000"], "exceeds model.max_positions=16384"),
        (
            ["harness.name=claude_code", "engine.max_model_len=4096"],
            "harness=claude_code needs engine.max_model_len>=",
        ),
        (
            ["harness.name=opencode", "engine.max_model_len=4096"],
            "harness=opencode needs engine.max_model_len>=",
        ),
        (["engine.temperature=0"], "engine.temperature=0"),
        (["engine.max_num_seqs=2"], "is below sandbox.concurrency"),
        (
            ["sandbox.name=kubernetes", "sandbox.kubernetes.ttl_s=60"],
            "sandbox.kubernetes.ttl_s=60 would end a pod",
        ),
        (["schedule.mode=async"], "needs schedule.max_staleness>=1"),
        (["schedule.max_staleness=1"], "set schedule.max_staleness=0"),
        (["schedule.mode=often"], "schedule.mode=often: use sync or async"),
        (["model.experts=0"], "backend.router_replay=true"),
        (["model.experts_per_token=9"], "model.experts_per_token=9"),
        (["model.heads=3"], "multiple of model.kv_heads"),
        (["filter.train_threads=[main,side]"], "filter.train_threads has side"),
        (["filter.train_threads=[]"], "filter.train_threads is empty"),
        (["filter.min_group=9"], "filter.min_group=9 exceeds algo.group_size=8"),
        (["run.steps=0"], "run.steps=0 must be at least 1"),
        (["launcher.stall_s=0"], "launcher.stall_s=0.0 must be above 0"),
        (["algo.betas=[0.9]"], "algo.betas"),
        (["algo.betas=[2,3]"], "algo.betas=3.0 must be at least 0 and at most 1"),
        (["engine.top_k=0"], "engine.top_k=0: use -1"),
        (["engine.dtype=half"], "engine.dtype=half: use bfloat16"),
        (["paths.runs=~/runs"], "paths.runs=~/runs: .* write .HOME"),
        (['paths.cache=""'], "paths.cache is empty"),
        (["harness.profile=huge"], "harness.profile=huge: use lean or stock"),
        (["proxy.echo=heard"], "proxy.echo=heard: use sampled or observed"),
        (["algo.loss=nonsense"], "algo.loss=nonsense: use vanilla, gspo, .* or sapo"),
        (["backend.device=tpu"], "backend.device=tpu: use cpu or cuda"),
    ],
)
def test_rule(default: DictConfig, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.compile(message)):
        check(default, overrides)


def test_all_problems_are_told_at_once(default: DictConfig) -> None:
    with pytest.raises(UserError) as caught:
        check(default, ["algo.group_size=1", "run.steps=0"])
    assert "algo.group_size" in str(caught.value) and "run.steps" in str(caught.value)


NUMBERS = {key: kind for key, kind in schema_keys().items() if kind in (int, float)}


def test_every_number_has_a_range(default: DictConfig) -> None:
    assert set(RANGES) == {*NUMBERS, "algo.betas"}
    for key in NUMBERS:
        assert RANGES[key].holds(OmegaConf.select(default, key)), key


def test_a_number_out_of_its_range_is_named(default: DictConfig) -> None:
    good = to_config(default)
    for key, kind in NUMBERS.items():
        out = [10**30, round(RANGES[key].low) - 1]
        for value in [*out, math.nan, math.inf] if kind is float else out:
            config = copy.deepcopy(good)
            *path, name = key.split(".")
            setattr(functools.reduce(getattr, path, config), name, value)
            with pytest.raises(UserError, match=rf"{key}=\S+ must be "):
                rules.check(config)


def test_not_a_number_is_told_on_the_way_from_the_command_line() -> None:
    with pytest.raises(UserError, match=r"(?s)kl_coef=inf must be.*learning_rate=nan must be"):
        compose(["algo.learning_rate=nan", "algo.kl_coef=1e400"])
