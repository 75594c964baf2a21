"""A canary after every weight sync: one short fixed prompt, scored by the engine and by the trainer.

If the engine still has old weights (or a kernel kept a repacked copy of them), the log-probabilities of its
own sample differ from the trainer's by far more than rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest allowed mean difference of the log-probabilities in nats. bf16 rounding gives 0.01 to 0.05 in the
mean and 0.3 for a single unlikely token; stale experts give 4."""

_TOKENS = 12
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class CanaryResult:
    """Absolute differences, in nats, over the sampled tokens."""

    max_abs: float
    mean_abs: float
    ok: bool


def check(
    server: Any, worker_group: Any, prompt_ids: list[int], *, dtype: str, replay: bool, step: int
) -> CanaryResult:
    """Sample from the engine, score with the trainer, compare.

    Args:
        server: actor handle of a rollout server.
        worker_group: verl's actor worker group.
        prompt_ids: the canary.
        dtype: of the engine; chooses the tolerance.
        replay: whether routing is replayed (MoE).
        step: names the row.

    Raises:
        ray.exceptions.GetTimeoutError: the engine did not answer in a minute.
    """
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": _TOKENS,
        "logprobs": True,
        "ignore_eos": True,
    }
    sample = ray.get(
        server.generate.remote(
            request_id=f"canary-{step}", prompt_ids=list(prompt_ids), sampling_params=params
        ),
        timeout=_DEADLINE_S,
    )
    output = AgentLoopOutput(
        prompt_ids=list(prompt_ids),
        response_ids=list(sample.token_ids),
        response_mask=[1] * len(sample.token_ids),
        response_logprobs=list(sample.log_probs),
        routed_experts=sample.routed_experts if replay else None,
        reward_score=0.0,
        num_turns=1,
        metrics=AgentLoopMetrics(),
    )
    field = output.as_dict()
    field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
    field["position_ids"] = torch.arange(len(field["input_ids"]))
    field["loss_mask"] = field["response_mask"]
    field["multi_modal_inputs"] = {}
    key, partition = f"canary{step}_0_0", "canary"
    length = len(field["input_ids"])
    tag = {
        "status": "success",
        "prompt_len": len(prompt_ids),
        "response_len": length - len(prompt_ids),
        "seq_len": length,
        "global_steps": step,
    }
    # Every data-parallel rank needs a row.
    role = "actor"
    if role not in worker_group._dispatch_info:
        worker_group._dispatch_info[role] = worker_group._query_dispatch_info(role)
    ranks = max(worker_group._dispatch_info[role]) + 1
    keys = [f"{key}{rank}" for rank in range(ranks)]
    tags = [dict(tag) for _ in keys]
    tq.kv_batch_put(
        keys=keys,
        partition_id=partition,
        fields=list_of_dict_to_tensordict([dict(field) for _ in keys]),
        tags=tags,
    )
    try:
        batch = KVBatchMeta(partition_id=partition, keys=keys, tags=tags)
        batch.extra_info.update({"calculate_entropy": False, "compute_loss": False, "temperature": 1.0})
        worker_group.compute_log_prob(batch)
        data = tq.kv_batch_get(
            keys=keys[:1], partition_id=partition, select_fields=["log_probs", "response_mask"]
        )
        scored = response_from_nested(data["log_probs"], data["response_mask"]).values().float().numpy()
    finally:
        tq.kv_clear(keys=keys, partition_id=partition)
    difference = np.abs(scored - np.asarray(sample.log_probs, dtype=np.float32))
    mean = float(difference.mean())
    return CanaryResult(float(difference.max()), mean, mean <= TOLERANCE.get(dtype, TOLERANCE["bfloat16"]))
