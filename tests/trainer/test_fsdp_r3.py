"""R3 on the router: with the recorded indices the forward equals an unpatched model's, and gradients flow."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
fsdp_r3 = pytest.importorskip("legorl.trainer.fsdp_r3", reason="needs the cpu extra")

pytestmark = pytest.mark.integration


def tiny() -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return Qwen3MoeForCausalLM(config).float().eval()


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def test_replaying_the_recorded_experts_changes_nothing() -> None:
    from verl.utils.veomni.router_replay import VeOmniRouterReplay

    ids = torch.arange(10)[None]
    model = tiny()
    recorded: list[torch.Tensor] = []
    hooks = [r.register_forward_hook(lambda _m, _i, out: recorded.append(out[2])) for r in routers(model)]
    plain = model(ids).logits
    for hook in hooks:
        hook.remove()

    replay = VeOmniRouterReplay()
    for router in routers(model):
        router.forward = fsdp_r3.replayed_router(replay, router)
    replay.begin_replay()
    replay.begin_microbatch(targets=[indices.clone() for indices in recorded])
    replayed = model(ids).logits
    assert torch.allclose(plain, replayed, atol=1e-6)


def test_other_experts_change_the_result_and_the_router_learns() -> None:
    from verl.utils.veomni.router_replay import VeOmniRouterReplay

    ids = torch.arange(10)[None]
    model = tiny()
    plain = model(ids).logits
    replay = VeOmniRouterReplay()
    for router in routers(model):
        router.forward = fsdp_r3.replayed_router(replay, router)
    forced = torch.tensor([[0, 1]]).expand(10, 2)
    replay.begin_replay()
    replay.begin_microbatch(targets=[forced.clone() for _ in routers(model)])
    logits = model(ids).logits
    assert (logits - plain).abs().max() > 1e-3
    logits.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers(model))
