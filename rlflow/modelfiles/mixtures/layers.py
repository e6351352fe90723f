"""Which layers of a mixture have experts, and how many of them a token takes, by its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.modelfiles.configs import LAYERS, text_value

FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def mixture_layers(text: Mapping[str, Any]) -> list[int]:
    """The numbers of layers with experts: all but the first ones, every so many, or as listed."""
    layers = text_value(text, *LAYERS)
    if text.get("mlp_layer_types"):
        return [at for at, kind in enumerate(text["mlp_layer_types"][:layers]) if kind != "dense"]
    every, first = text_value(text, "decoder_sparse_step") or 1, text_value(text, *FIRST)
    plain = set(text.get("mlp_only_layers") or ())
    return [at for at in range(first, layers) if at not in plain and (at + 1) % every == 0]


def experts_a_token(text: Mapping[str, Any]) -> int:
    """How many experts of a layer a token takes."""
    return text_value(text, *CHOSEN) or 1
