"""Each rule across parameters refuses its case and names the keys."""

from __future__ import annotations

import re

import pytest

from legorl.config.compose import compose
from legorl.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.group_size=1"], "algo.group_size=1: .* at least 2"),
        (["run.heldout_tasks=65"], "run.heldout_tasks=65 exceeds tasks.heldout=64"),
        (["algo.tasks_per_step=8", "tasks.train=4"], "algo.tasks_per_step=8 exceeds tasks.train=4"),
        (["algo.minibatches=7"], "trials do not split into algo.minibatches=7"),
        (
            ["engine.reply_tokens=16384", "engine.trial_tokens=20000"],
            "must be below engine.max_model_len=16384",
        ),
        (["engine.trial_tokens=10"], "less than one reply"),
        (["engine.max_model_len=20000"], "exceeds model.max_positions=16384"),
        (
            ["harness=claude_code", "engine.max_model_len=4096"],
            "harness=claude_code needs engine.max_model_len>=",
        ),
        (["harness=opencode", "engine.max_model_len=4096"], "harness=opencode needs engine.max_model_len>="),
        (["engine.temperature=0"], "engine.temperature=0"),
        (["engine.max_num_seqs=2"], "is below sandbox.concurrency"),
        (["schedule.mode=async"], "needs schedule.max_staleness>=1"),
        (["schedule.max_staleness=1"], "set schedule.max_staleness=0"),
        (["schedule.mode=often"], "schedule.mode=often: use sync or async"),
        (["model=tiny_dense", "backend.router_replay=true"], "backend.router_replay=true"),
        (["model.experts_per_token=9"], "model.experts_per_token=9"),
        (["model.heads=3"], "multiple of model.kv_heads"),
        (["filter.train_threads=[main,side]"], "filter.train_threads has side"),
        (["filter.train_threads=[]"], "filter.train_threads is empty"),
        (["filter.min_group=9"], "filter.min_group=9 exceeds algo.group_size=8"),
        (["run.steps=0"], "run.steps=0 must be at least 1"),
        (["launcher.stall_s=0"], "launcher.stall_s=0.0 must be a positive"),
        (["algo.betas=[0.9]"], "algo.betas"),
        (["harness.profile=huge"], "harness.profile=huge: use lean or stock"),
        (["backend.device=tpu"], "backend.device=tpu: use cpu or cuda"),
    ],
)
def test_rule(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.compile(message)):
        compose(overrides)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        compose(["algo.group_size=1", "run.steps=0"])
    assert "algo.group_size" in str(caught.value) and "run.steps" in str(caught.value)
