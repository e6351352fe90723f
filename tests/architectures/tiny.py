"""Tiny configs of every architecture that transformers has: a few layers, 32 wide."""

from __future__ import annotations

from typing import Any

# Sizes by all the names that configs have for them. A config is given those that it has.
WIDTHS = {
    32: "hidden_size n_embd d_model dim emb_dim input_hidden_size embedding_size",
    48: "intermediate_size ffn_hidden_size n_inner decoder_ffn_dim encoder_ffn_dim d_inner"
    " ffn_dim dense_intermediate_size shared_expert_intermediate_size shared_intermediate_size"
    " moe_shared_expert_intermediate_size"
    " intermediate_size_mlp attention_hidden_size mlp_intermediate_size",
    24: "moe_intermediate_size expert_ffn_hidden_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads"
    " swa_num_attention_heads encoder_attention_heads num_experts num_local_experts"
    " n_routed_experts moe_num_experts",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok"
    " num_experts_per_token moe_k moe_topk top_k_experts",
    3: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks",
    8: "head_dim attention_head_dim swa_head_dim global_head_dim qk_nope_head_dim v_head_dim"
    " swa_v_head_dim kv_channels",
    16: "q_lora_rank kv_lora_rank",
    64: "vocab_size n_vocab vocab_size_per_layer_input",
    96: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length",
    1: "n_group topk_group num_expert_group num_limited_groups first_k_dense_replace"
    " n_shared_experts moe_num_shared_experts num_dense_layers moe_layer_start_index"
    " decoder_sparse_step",
}  # fmt: skip
SIZES = {name: size for size, names in WIDTHS.items() for name in names.split()}
SIZES |= {"qk_rope_head_dim": 4, "sliding_window": 4, "conv_kernel": 4, "mamba_n_heads": 4,
          "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_num_heads": 4,
          "mamba_head_dim": 16, "image_size": 28,
          "patch_size": 14, "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
          "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "n_groups": 2,
          "mamba_n_groups": 1}  # fmt: skip
OFTEN_LEFT_OUT = ("head_dim", "num_key_value_heads")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id",
          "decoder_start_token_id", "unk_token_id")  # fmt: skip

# Positions by time, height and width, in a head of 8.
MULTI_ROPE = {
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0,
    }
}  # fmt: skip
# What single families need besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 24,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_text": {"pad_token_id": 0},
    "gemma4_unified_text": {"pad_token_id": 0},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe"]},
    "qwen2_vl_text": MULTI_ROPE,
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 32},
    "qwen2_5_vl_text": MULTI_ROPE,
    "glm4v_text": MULTI_ROPE,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 12)},
    "zamba2": {"num_hidden_layers": 54},
    "zaya": {"num_experts_per_tok": 1},
}
# Of these transformers makes no small config.
UNMADE = {"dots3_note", "gemma4_assistant"}


def tiny_config(kind: str) -> Any:
    """A config of a family with tiny widths; what transformers refuses is raised."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    made = transformers.CONFIG_MAPPING[kind]
    said = made().to_dict()
    try:
        return made(**narrow(said, kind, None))
    except StrictDataclassError:
        return made(**narrow(said, kind, 1))


def narrow(said: dict[str, Any], kind: str, token: int | None) -> dict[str, Any]:
    """What makes a config of a family small, `said` being its default."""
    small: dict[str, Any] = {
        name: size
        for name, size in SIZES.items()
        if type(said.get(name)) is int or (name in OFTEN_LEFT_OUT and name in said)
    }
    if "qk_rope_head_dim" in small:
        small |= {"head_dim": small["qk_rope_head_dim"], "num_key_value_heads": 4}
    small |= {name: token for name in TOKENS if name in said}
    if said.get("layer_types"):
        small["layer_types"] = few_layers(said["layer_types"])
    small |= {"initializer_range": 0.2} if "initializer_range" in said else {}
    for name, inner in said.items():
        if isinstance(inner, dict) and inner.get("model_type"):
            own = narrow(inner, inner["model_type"], token)
            small[name] = {**own, "model_type": inner["model_type"]}
    return small | SPECIAL.get(kind, {})


def few_layers(types: list[str]) -> list[str]:
    """Three layers with every type that a model of many has."""
    kinds = list(dict.fromkeys(types))
    return (kinds * 3)[: max(3, len(kinds))]
