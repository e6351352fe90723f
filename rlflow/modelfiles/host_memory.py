"""What lies in host memory for a device takes there: the rule of the plan and of the runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlflow.modelfiles.configs import text_config

EMBEDDINGS = {"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"}
PAGE = 4096
"""Bytes of a page: a device's driver keeps whole pages where they are."""
LOADING_PIECE = 64 << 20
"""The most bytes that loading has of a tensor on a host at a time: as they are in its file, and
rounded; more where one row takes more."""


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that `size` bytes take which a device copies by itself."""
    return -(-size // PAGE) * PAGE


def made_whole(config: Mapping[str, Any], stored: Collection[str]) -> bool:
    """Whether one process makes a model whole in host memory before its weights go to a device.

    By its config and the names of the tensors in its files: transformers unpacks quantised tensors,
    and takes a tied head apart where the files have both. Engines look closer, at every tensor;
    they stream no model of which this is true.
    """
    text = text_config(config)
    quantised = config.get("quantization_config") or text.get("quantization_config")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    heads = any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in stored)
    twice = tied and heads and any(is_embedding(name) for name in stored)
    return bool(quantised) or twice


def is_embedding(name: str) -> bool:
    """Whether a tensor is an embedding of tokens."""
    return name.rpartition(".weight")[0].rpartition(".")[2] in EMBEDDINGS
