"""Tiny random models with multi-head latent attention; their values are narrower than keys."""

from __future__ import annotations

import torch
import transformers

LATENT = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {
    "deepseek_v2": {**ROUTED, "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": {**ROUTED, "first_k_dense_replace": 1},
    "glm4_moe_lite": ROUTED,
    "minicpm3": {},
    "youtu": {},
}
BIAS = "e_score_correction_bias"


def save_latent(family, path, **options):
    """Write a tiny model of a family; routers that have biases have some that matter."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{**LATENT, **FAMILIES[family], **options})
    module = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in module.named_buffers():
        if name.endswith(BIAS):
            buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    module.save_pretrained(path)
    return str(path)
