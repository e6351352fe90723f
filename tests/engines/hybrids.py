"""Tiny random models with layers that carry states from token to token."""

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
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
MIXED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
FAMILIES = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **MIXED},
    "olmo_hybrid": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_chunk_size": 8,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_d_conv": 4, "mamba_chunk_size": 8, "mamba_expand": 2, "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4, "chunk_size": 8,
    },
}  # fmt: skip


def save_hybrid(family, path, **options):
    """Write a tiny model of a family."""
    torch.manual_seed(0)
    given = {**SMALL, **FAMILIES[family], **options}
    if "layers_block_type" in given:
        del given["num_hidden_layers"]
    config = transformers.CONFIG_MAPPING[family](**given)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)
