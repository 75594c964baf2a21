"""Rules across parameters. Each message names the values and how to mend them."""

from __future__ import annotations

from collections.abc import Iterator

from legorl.config.schema import Config
from legorl.errors import UserError

LONG_PROMPT_HARNESSES = {"claude_code": 12288, "opencode": 12288}
"""Context a harness needs: tools and instructions alone fill several thousand tokens."""


def check(config: Config) -> None:
    """Raises `UserError` with every rule that does not hold."""
    problems = list(_problems(config))
    if problems:
        raise UserError(
            "\n".join(["The configuration does not fit together:", *(f"  - {p}" for p in problems)])
        )


def _problems(c: Config) -> Iterator[str]:
    yield from _ranges(c)
    yield from _batch(c)
    yield from _lengths(c)
    if c.filter.min_group > c.algo.group_size:
        yield f"filter.min_group={c.filter.min_group} exceeds algo.group_size={c.algo.group_size}: no group would be kept."
    if unknown := sorted(set(c.filter.train_threads) - {"main", "subagent"}):
        yield f"filter.train_threads has {', '.join(unknown)}: use main, subagent or both."
    if not c.filter.train_threads:
        yield "filter.train_threads is empty: nothing would be trained. Use [main]."
    if c.harness.profile not in ("lean", "stock"):
        yield f"harness.profile={c.harness.profile}: use lean or stock."
    if c.schedule.mode not in ("sync", "async"):
        yield f"schedule.mode={c.schedule.mode}: use sync or async."
    if c.schedule.mode == "async" and c.schedule.max_staleness < 1:
        yield "schedule.mode=async needs schedule.max_staleness>=1: set it to 1, or take schedule=sync."
    if c.schedule.mode == "sync" and c.schedule.max_staleness != 0:
        yield f"schedule.mode=sync is never stale: set schedule.max_staleness=0 (not {c.schedule.max_staleness})."
    if c.backend.router_replay and not c.model.path and c.model.experts == 0:
        yield "backend.router_replay=true with a dense policy (model.experts=0): set backend.router_replay=false."
    if c.backend.device not in ("cpu", "cuda"):
        yield f"backend.device={c.backend.device}: use cpu or cuda."
    if c.model.experts and c.model.experts_per_token > c.model.experts:
        yield f"model.experts_per_token={c.model.experts_per_token} exceeds model.experts={c.model.experts}."
    if c.model.heads % c.model.kv_heads:
        yield f"model.heads={c.model.heads} is no multiple of model.kv_heads={c.model.kv_heads}."


def _ranges(c: Config) -> Iterator[str]:
    at_least = {
        "run.steps": (c.run.steps, 1),
        "run.heldout_every": (c.run.heldout_every, 1),
        "run.heldout_tasks": (c.run.heldout_tasks, 1),
        "run.checkpoint_every": (c.run.checkpoint_every, 0),
        "harness.turn_limit": (c.harness.turn_limit, 1),
        "sandbox.concurrency": (c.sandbox.concurrency, 1),
        "backend.world_size": (c.backend.world_size, 1),
        "algo.tasks_per_step": (c.algo.tasks_per_step, 1),
        "algo.minibatches": (c.algo.minibatches, 1),
        "engine.reply_tokens": (c.engine.reply_tokens, 1),
        "engine.max_num_seqs": (c.engine.max_num_seqs, 1),
        "filter.min_group": (c.filter.min_group, 1),
        "algo.learning_rate": (c.algo.learning_rate, 0.0),
    }
    for key, (value, least) in at_least.items():
        if value < least:
            yield f"{key}={value} must be at least {least}."
    for key, seconds in {
        "harness.deadline_s": c.harness.deadline_s,
        "launcher.deadline_s": c.launcher.deadline_s,
        "launcher.stall_s": c.launcher.stall_s,
        "engine.request_timeout_s": c.engine.request_timeout_s,
        "sandbox.start_timeout_s": c.sandbox.start_timeout_s,
    }.items():
        if seconds <= 0:
            yield f"{key}={seconds} must be a positive number of seconds."
    if c.engine.temperature <= 0:
        yield f"engine.temperature={c.engine.temperature} must be positive: a greedy policy has no log-probabilities to train on."
    if len(c.algo.betas) != 2:
        yield f"algo.betas={c.algo.betas} must be two numbers."


def _batch(c: Config) -> Iterator[str]:
    trials = c.algo.tasks_per_step * c.algo.group_size
    if c.algo.group_size < 2:
        yield f"algo.group_size={c.algo.group_size}: an advantage compares trials of one task, so use at least 2."
    if c.algo.minibatches >= 1 and trials % c.algo.minibatches:
        yield (
            f"algo.tasks_per_step * algo.group_size = {trials} trials do not split into "
            f"algo.minibatches={c.algo.minibatches}: use a divisor of {trials}."
        )
    if c.algo.tasks_per_step > c.tasks.train:
        yield f"algo.tasks_per_step={c.algo.tasks_per_step} exceeds tasks.train={c.tasks.train}: lower it, or raise tasks.train."
    if c.run.heldout_tasks > c.tasks.heldout:
        yield f"run.heldout_tasks={c.run.heldout_tasks} exceeds tasks.heldout={c.tasks.heldout}: lower it, or raise tasks.heldout."


def _lengths(c: Config) -> Iterator[str]:
    if c.engine.reply_tokens >= c.engine.max_model_len:
        yield f"engine.reply_tokens={c.engine.reply_tokens} must be below engine.max_model_len={c.engine.max_model_len}."
    if c.engine.trial_tokens < c.engine.reply_tokens:
        yield f"engine.trial_tokens={c.engine.trial_tokens} is less than one reply: raise it to engine.reply_tokens={c.engine.reply_tokens}."
    if not c.model.path and c.engine.max_model_len > c.model.max_positions:
        yield f"engine.max_model_len={c.engine.max_model_len} exceeds model.max_positions={c.model.max_positions}: lower it."
    if c.engine.max_num_seqs < c.sandbox.concurrency:
        yield (
            f"engine.max_num_seqs={c.engine.max_num_seqs} is below sandbox.concurrency={c.sandbox.concurrency}: "
            "requests in flight would wait for each other at a weight sync; raise it."
        )
    need = LONG_PROMPT_HARNESSES.get(c.harness.name, 0)
    if c.engine.max_model_len < need:
        yield f"harness={c.harness.name} needs engine.max_model_len>={need} (it is {c.engine.max_model_len})."
