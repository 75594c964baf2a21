"""verl's FSDP engine with R3: the trainer computes with the experts that the engine chose while sampling.

R3 (rollout routing replay, arXiv 2510.11370): each router keeps its own logits and gradient, but the top-k
indices are those recorded at sampling. verl 0.9.1 has this for Megatron and VeOmni; here verl's own
model-agnostic controller (`VeOmniRouterReplay`) is driven from FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from verl.utils import tensordict_utils as tu
from verl.utils.veomni.router_replay import RouterReplayAction, VeOmniRouterReplay
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead


def replayed_router(replay: VeOmniRouterReplay, router: torch.nn.Module) -> Callable[[torch.Tensor], Any]:
    """Forward of transformers 5's top-k softmax router with the indices substituted by `replay`.

    Returns a function hidden states [..., H] -> (logits [N, E], weights [N, K], indices [N, K]).
    """

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = hidden_states.reshape(-1, router.hidden_dim)
        logits = F.linear(hidden, router.weight)
        scores = F.softmax(logits, dtype=torch.float, dim=-1)
        _, indices = torch.topk(scores, router.top_k, dim=-1)
        indices = replay.on_router_forward(router, scores, indices)
        weights = scores.gather(-1, indices)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), indices

    return forward


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class FSDPRouterReplayEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """FSDP engine that replays `routed_experts` [nnz, L, K] of a batch in forward and backward."""

    _replay: VeOmniRouterReplay | None = None

    def _build_module(self) -> torch.nn.Module:
        module: torch.nn.Module = super()._build_module()
        mode = getattr(self.engine_config.router_replay, "mode", "disabled")
        if mode == "R3":
            self._replay = VeOmniRouterReplay()
            routers = [m for m in module.modules() if type(m).__name__.endswith("TopKRouter")]
            layers = module.config.num_hidden_layers
            if len(routers) != layers:
                raise RuntimeError(
                    f"R3 needs a top-k router in each of the {layers} layers of {type(module).__name__}, "
                    f"found {len(routers)}; set backend.router_replay=false for a dense policy."
                )
            for router in routers:
                router.forward = replayed_router(self._replay, router)
        return module

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        replay = self._replay
        active = replay is not None and tu.get_non_tensor_data(data, "enable_routing_replay", default=True)
        if not active or replay is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        replay.begin_replay()
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            replay.clear()

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        replay = self._replay
        if replay is not None and replay.action is RouterReplayAction.REPLAY:
            target = _flat_targets(micro_batch, inputs, output_args)
            replay.begin_microbatch(targets=list(target.unbind(1)))
        return inputs, output_args


def _flat_targets(micro_batch: Any, inputs: Any, output_args: Any) -> torch.Tensor:
    """Expert indices in the order in which the routers see the tokens: [tokens, L, K] int64."""
    experts = micro_batch["routed_experts"]
    target = (experts.values() if experts.is_nested else experts).to(torch.int64)
    if inputs["attention_mask"] is not None:  # padded layout: rows scattered to batch x longest
        batch, longest = inputs["input_ids"].shape
        lengths = micro_batch["input_ids"].offsets().diff()
        full = target.new_zeros(batch, longest, *target.shape[1:])
        full[torch.arange(longest)[None] < lengths[:, None]] = target
        return full.flatten(0, 1)
    if output_args.get("pad_size"):
        target = torch.cat([target, target.new_zeros((output_args["pad_size"], *target.shape[1:]))])
    return target
