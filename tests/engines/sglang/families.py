"""Tiny models of other kinds, as the real engine wants them: configs as published ones are.

Transformers leaves out of a config what its own classes do not read, and SGLang reads it. On a CPU
it fills layers of experts until they are a multiple of 32 wide.
"""

from __future__ import annotations

from tests.engines.hybrids import save_hybrid
from tests.engines.latents import save_latent
from tests.engines.mixtures import save_mixture

WIDE = {"intermediate_size": 64, "moe_intermediate_size": 32}
# Those of DeepSeek-V3, whose positions SGLang knows on a CPU as it stretches them.
PUBLISHED = {
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
NEXT = {"full_attention_interval": 2, "linear_value_head_dim": 8}
FAMILIES = {
    "qwen3_moe": (save_mixture, WIDE),
    "deepseek_v3": (save_latent, {**WIDE, **PUBLISHED}),
    "qwen3_next": (save_hybrid, {**WIDE, **NEXT, "shared_expert_intermediate_size": 32}),
}
ROUTED = ("qwen3_moe", "deepseek_v3")
# Slots for states: SGLang would take memory for them that another process may have by then.
STATES = {"max_mamba_cache_size": 256}


def save_family(family, path, **options):
    """Write a tiny random model of a family."""
    make, more = FAMILIES[family]
    return make(family, path, **{**more, **options})
