"""The tiny policy's network, a Qwen3 (dense or mixture of experts) in fp32, and its Hugging Face directory.

Only this file and `warm_start.py` import torch and transformers, and only when a function is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from legorl.config.schema import ModelConfig
from legorl.policy.template import END_OF_TEXT, TURN_END
from legorl.policy.tokenizer import save_tokenizer, train_tokenizer

INITIALIZER_RANGE = 0.05


def build_model(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> Any:
    """A fresh `Qwen3MoeForCausalLM`, or `Qwen3ForCausalLM` when `config.experts` is 0, in fp32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_positions,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not config.experts:
            return Qwen3ForCausalLM(Qwen3Config(**common)).float()
        moe = Qwen3MoeConfig(
            **common,
            num_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            moe_intermediate_size=config.expert_size,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
        return Qwen3MoeForCausalLM(moe).float()


def save_policy(model: Any, tokenizer: Tokenizer, config: ModelConfig, out: Path) -> Path:
    """Write weights, model configuration and tokenizer into the directory `out`; returns it."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.token_to_id(TURN_END)
    model.generation_config.pad_token_id = tokenizer.token_to_id(END_OF_TEXT)
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(str(out))
    save_tokenizer(tokenizer, out, config.max_positions)
    return out


def random_policy(config: ModelConfig, out: Path, texts: Iterable[str] = (), seed: int = 0) -> Path:
    """An untrained policy, for tests: it speaks noise. `texts` teach the tokenizer its merges."""
    tokenizer = train_tokenizer(texts, config.vocabulary)
    return save_policy(build_model(config, tokenizer, seed), tokenizer, config, out)
