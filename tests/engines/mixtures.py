"""Tiny random mixtures of experts, and what ranks do in the tests of them."""

from __future__ import annotations

import torch
import transformers

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
MIXED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
KINDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**MIXED, "num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {**MIXED, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
}

# Families that were not compared over ranks.
ALONE = {
    "glm4_moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1},
    },
}


def save_mixture(family, path, **options):
    """Write a tiny random model of a family, as transformers does."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](
        **{**SMALL, **{**KINDS, **ALONE}[family], **options}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)
