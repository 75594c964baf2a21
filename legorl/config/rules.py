"""Rules across parameters. Each message names the values and how to mend them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from legorl.config.ranges import out_of_range
from legorl.config.schema import Config
from legorl.errors import UserError

CONTEXT_NEEDED = dict.fromkeys(("claude_code", "codex", "opencode", "openhands", "qwen_code"), 12288)
"""Least `engine.max_model_len` of harnesses whose tools and instructions fill several thousand tokens."""

LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "kl_cov",
    "sapo",
)
"""Policy losses of verl 0.9.1's registry (its `bypass_mode` is a way to call one of them, and no loss)."""


def check(config: Config) -> None:
    """Raises `UserError` with every rule that does not hold."""
    problems = [problem for rule in _RULES for problem in rule(config)]
    if problems:
        raise UserError(
            "\n".join(["The configuration does not fit together:", *(f"  - {p}" for p in problems)])
        )


def _paths(c: Config) -> Iterator[str]:
    paths = {f"paths.{key}": value for key, value in dataclasses.asdict(c.paths).items()}
    for key, value in {**paths, "tasks.pool": c.tasks.pool, "model.path": c.model.path}.items():
        if value.startswith("~"):
            yield f"{key}={value}: the shell leaves this ~ as it is; write $HOME."
        if not value and key != "model.path":
            yield f"{key} is empty: name a directory."


def _choices(c: Config) -> Iterator[str]:
    allowed = {
        "harness.profile": (c.harness.profile, ("lean", "stock")),
        "schedule.mode": (c.schedule.mode, ("sync", "async")),
        "backend.device": (c.backend.device, ("cpu", "cuda")),
        "backend.param_dtype": (c.backend.param_dtype, ("fp32", "bf16", "fp16")),
        "engine.dtype": (c.engine.dtype, ("bfloat16", "float16", "float32")),
        "sandbox.verify": (c.sandbox.verify, ("fresh", "same")),
        "tasks.reward": (c.tasks.reward, ("binary", "share")),
        "proxy.echo": (c.proxy.echo, ("sampled", "observed")),
        "algo.loss": (c.algo.loss, LOSSES),
        "algo.lr_schedule": (c.algo.lr_schedule, ("cosine", "constant")),
    }
    for key, (value, values) in allowed.items():
        if value not in values:
            yield f"{key}={value}: use {', '.join(values[:-1])} or {values[-1]}."
    if unknown := sorted(set(c.filter.train_threads) - {"main", "subagent"}):
        yield f"filter.train_threads has {', '.join(unknown)}: use main, subagent or both."
    if not c.filter.train_threads:
        yield "filter.train_threads is empty, so nothing would be trained: use [main]."


def _batch(c: Config) -> Iterator[str]:
    algo = c.algo
    if algo.group_size < 2:
        yield f"{algo.group_size=}: an advantage compares trials of one task, so use at least 2."
    elif c.filter.min_group > algo.group_size:
        yield f"filter.min_group={c.filter.min_group} exceeds {algo.group_size=}: lower it."
    if algo.minibatches >= 1 and algo.tasks_per_step % algo.minibatches:
        yield (
            f"{algo.tasks_per_step=} groups do not split into {algo.minibatches=}: "
            f"use a divisor of {algo.tasks_per_step}."
        )
    if algo.tasks_per_step > c.tasks.train:
        yield f"{algo.tasks_per_step=} exceeds tasks.train={c.tasks.train}: lower it."
    if c.run.heldout_tasks > c.tasks.heldout:
        yield f"run.heldout_tasks={c.run.heldout_tasks} exceeds tasks.heldout={c.tasks.heldout}: lower it."
    if len(algo.betas) != 2:
        yield f"{algo.betas=} must be two numbers."


def _sampling(c: Config) -> Iterator[str]:
    engine = c.engine
    if engine.temperature <= 0:
        yield f"{engine.temperature=}: a greedy policy explores nothing; take 1.0."
    if engine.top_k == 0:
        yield f"{engine.top_k=}: use -1 for all tokens."
    if engine.reply_tokens >= engine.max_model_len:
        yield f"{engine.reply_tokens=} must be below {engine.max_model_len=}."
    if engine.trial_tokens < engine.reply_tokens:
        yield f"{engine.trial_tokens=} is less than one reply ({engine.reply_tokens=})."
    if not c.model.path and engine.max_model_len > c.model.max_positions:
        yield f"{engine.max_model_len=} exceeds model.max_positions={c.model.max_positions}."
    if engine.max_num_seqs < c.sandbox.concurrency:
        yield (
            f"{engine.max_num_seqs=} is below sandbox.concurrency={c.sandbox.concurrency}: "
            "waiting requests would hold up a weight sync; raise it."
        )
    needed = CONTEXT_NEEDED.get(c.harness.name, 0)
    if engine.max_model_len < needed:
        yield f"harness={c.harness.name} needs engine.max_model_len>={needed} (not {engine.max_model_len})."


def _schedule(c: Config) -> Iterator[str]:
    staleness = c.schedule.max_staleness
    if c.schedule.mode == "async" and staleness < 1:
        yield f"schedule.mode=async needs schedule.max_staleness>=1 (not {staleness}), or take schedule=sync."
    if c.schedule.mode == "sync" and staleness != 0:
        yield f"schedule.mode=sync is never stale: set schedule.max_staleness=0 (not {staleness})."


def _policy(c: Config) -> Iterator[str]:
    model = c.model
    if model.path:
        return
    if c.backend.router_replay and model.experts == 0:
        yield "backend.router_replay=true, but a policy with model.experts=0 routes nothing: set it to false."
    if model.experts and not 1 <= model.experts_per_token <= model.experts:
        yield f"{model.experts_per_token=} must lie between 1 and {model.experts=}."
    if model.kv_heads >= 1 and model.heads % model.kv_heads:
        yield f"{model.heads=} must be a multiple of {model.kv_heads=}."


def _kubernetes(c: Config) -> Iterator[str]:
    if c.sandbox.name != "kubernetes":
        return
    kubernetes, sandbox = c.sandbox.kubernetes, c.sandbox
    longest = sandbox.start_timeout_s + c.harness.deadline_s + 4 * sandbox.transfer_timeout_s
    if kubernetes.ttl_s <= longest:
        yield (
            f"sandbox.kubernetes.ttl_s={kubernetes.ttl_s:g} would end a pod within a trial, which may take "
            f"{longest:g} s and its grading: raise it."
        )


_RULES = (out_of_range, _paths, _choices, _batch, _sampling, _schedule, _policy, _kubernetes)
