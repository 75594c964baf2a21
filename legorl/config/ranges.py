"""Where each number of the tree may lie.

Invariant: every int and float key has an interval here, and none holds NaN or infinity: a number that is no
quantity is refused before anything is made, and not by a library after minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from legorl.config.schema import Config


@dataclass(frozen=True)
class Range:
    """An interval."""

    low: float
    high: float = 2**31 - 1
    open: bool = False
    """Without `low` itself."""

    def holds(self, value: float) -> bool:
        """False for NaN."""
        return self.low <= value <= self.high and not (self.open and value == self.low)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open else f"at least {self.low:g}"
        return low if self.high == Range.high else f"{low} and at most {self.high:g}"


COUNT = Range(1)
ANY_COUNT = Range(0)
AMOUNT = Range(0)
SECONDS = Range(0, open=True)
SHARE = Range(0, 1)
SEED = Range(0, 2**32 - 1)

RANGES: dict[str, Range] = {
    "seed": SEED,
    "harness.turn_limit": COUNT,
    "harness.deadline_s": SECONDS,
    "harness.command_timeout_s": COUNT,
    "backend.world_size": COUNT,
    "backend.microbatch_tokens": COUNT,
    "backend.threads": COUNT,
    "sandbox.concurrency": COUNT,
    "sandbox.memory_mb": COUNT,
    "sandbox.pids": COUNT,
    "sandbox.disk_mb": COUNT,
    "sandbox.start_timeout_s": SECONDS,
    "sandbox.transfer_timeout_s": SECONDS,
    "sandbox.local.image_cache_mb": COUNT,
    "sandbox.local.image_timeout_s": SECONDS,
    "sandbox.retries": ANY_COUNT,
    "sandbox.retry_delay_s": AMOUNT,
    "sandbox.pool.starts_per_s": AMOUNT,
    "sandbox.pool.queue_timeout_s": SECONDS,
    "sandbox.pool.warm": ANY_COUNT,
    "sandbox.pool.drain_s": AMOUNT,
    "sandbox.pool.breaker_window": COUNT,
    "sandbox.pool.breaker_rate": SHARE,
    "sandbox.pool.breaker_pause_s": AMOUNT,
    "sandbox.pool.breaker_probes": ANY_COUNT,
    "sandbox.kubernetes.cpu": Range(0, open=True),
    "sandbox.kubernetes.cpu_request": AMOUNT,
    "sandbox.kubernetes.memory_request_mb": ANY_COUNT,
    "sandbox.kubernetes.ttl_s": SECONDS,
    "sandbox.kubernetes.orphan_s": Range(15),  # signs of life come every five seconds
    "filter.min_group": COUNT,
    "algo.clip_low": AMOUNT,
    "algo.clip_high": AMOUNT,
    "algo.kl_coef": AMOUNT,
    "algo.entropy_coef": AMOUNT,
    "algo.learning_rate": AMOUNT,
    "algo.warmup_steps": ANY_COUNT,
    "algo.weight_decay": AMOUNT,
    "algo.betas": SHARE,
    "algo.grad_clip": Range(0, open=True),
    "algo.tasks_per_step": COUNT,
    "algo.group_size": COUNT,
    "algo.minibatches": COUNT,
    "model.hidden_size": COUNT,
    "model.layers": COUNT,
    "model.heads": COUNT,
    "model.kv_heads": COUNT,
    "model.head_dim": COUNT,
    "model.experts": ANY_COUNT,
    "model.experts_per_token": ANY_COUNT,
    "model.expert_size": COUNT,
    "model.mlp_size": COUNT,
    "model.vocabulary": Range(256),  # a byte-level BPE begins with the bytes
    "model.max_positions": COUNT,
    "model.warm_start.episodes": ANY_COUNT,
    "model.warm_start.steps": ANY_COUNT,
    "model.warm_start.batch": COUNT,
    "model.warm_start.learning_rate": AMOUNT,
    "model.warm_start.matrix_learning_rate": AMOUNT,
    "model.warm_start.skill_share": SHARE,
    "model.warm_start.seed": SEED,
    "engine.max_model_len": COUNT,
    "engine.max_num_seqs": COUNT,
    "engine.max_batched_tokens": COUNT,
    "engine.kv_cache_gb": COUNT,
    "engine.temperature": Range(0, 2),  # vLLM's own limit
    "engine.top_p": Range(0, 1, open=True),
    "engine.top_k": Range(-1),
    "engine.reply_tokens": COUNT,
    "engine.trial_tokens": COUNT,
    "engine.request_timeout_s": SECONDS,
    "tasks.train": COUNT,
    "tasks.heldout": COUNT,
    "tasks.seed": SEED,
    "schedule.max_staleness": ANY_COUNT,
    "launcher.deadline_s": SECONDS,
    "launcher.stall_s": SECONDS,
    "launcher.grace_s": AMOUNT,
    "launcher.object_store_mb": Range(75),  # Ray's least
    "run.steps": COUNT,
    "run.heldout_every": COUNT,
    "run.heldout_tasks": COUNT,
    "run.checkpoint_every": ANY_COUNT,
}


def out_of_range(config: Config) -> Iterator[str]:
    """A sentence for every number outside of its interval."""
    for key, value in _numbers(dataclasses.asdict(config)):
        if not RANGES[key].holds(value):
            yield f"{key}={value} must be {RANGES[key]}."


def _numbers(tree: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """(dotted key, number) of a tree; the numbers of a list under the list's key."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _numbers(value, f"{key}.{name}" if key else name)
    elif isinstance(tree, list):
        for value in tree:
            yield from _numbers(value, key)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield key, tree
