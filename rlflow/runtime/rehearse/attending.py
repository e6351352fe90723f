"""Attention of whole pictures, as CUDA devices compute it: by kernels that keep no scores.

torch's `scaled_dot_product_attention` has kernels of each kind of device, and products for others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

KERNELS = torch.ops.aten
# Bytes of the numbers that flash attention takes, and what it fills heads up to a multiple of.
NARROW, STEP = 2, 8


def attended_by_kernels(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention by flash attention, or with a mask or wide numbers by the memory-efficient kernel.

    That is what torch takes on CUDA devices; on the CPU it is the `plain` one.
    """
    return partial(_attended, plain)


def _attended(
    plain: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What heads attend to, `[rows, heads, tokens, size]`, of such queries, keys and values."""
    how: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if query.device.type == "cpu" or enable_gqa or query.ndim != 4:
        return plain(query, key, value, attn_mask, enable_gqa=enable_gqa, **how)
    size = query.shape[-1]
    how["scale"] = scale or size**-0.5
    if attn_mask is None and query.element_size() == NARROW:
        q, k, v = (nn.functional.pad(each, (0, -size % STEP)) for each in (query, key, value))
        found: Tensor = KERNELS._scaled_dot_product_flash_attention(q, k, v, **how)[0]
        return found[..., :size]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    made: Tensor = KERNELS._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, **how
    )[0]
    return made
