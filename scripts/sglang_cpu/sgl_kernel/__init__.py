"""Stands for SGLang's compiled kernels on a CPU: no wheel of them has the CPU's.

On an x86 CPU without AMX every layer computes in plain torch, so only the attention of the backend
`intel_amx` is called here, over all sequences of a batch at once, layers that carry states, and
what speculative decoding keeps books with. Any other name can be imported and raises when it is
called. The signatures are those that SGLang calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_kernel.chains import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    seen_in_tree,
    verify_tree_greedy_cpu,
)
from sgl_kernel.mamba import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0.4.10+cpu.plain"

# Sequences are computed as one padded batch while that makes at most so much more work.
PADDED_QUERIES = 1.5
PADDED_KEYS = 2.0


def gathered(buffer: Tensor, slots: Tensor) -> Tensor:
    """Keys or values of `slots [rows, keys]`, `[rows, heads, keys, size]`."""
    return buffer[slots].transpose(1, 2)


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: Any,
    v_scale: Any,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Any,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
) -> None:
    """Attend with one query `[rows, heads, size]` a sequence; writes `k`, `v` first, then `o`."""
    plain_only(logit_cap, is_cross, sinks)
    if k is not None and v is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    rows, heads, size = q.shape
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :longest].long()
    places = torch.arange(longest)
    mask = places < seq_lens[:, None]
    if window > 0:
        mask &= places >= seq_lens[:, None] - window
    groups = k_buffer.shape[1]
    made = F.scaled_dot_product_attention(
        q.view(rows, groups, heads // groups, size),
        gathered(k_buffer, slots),
        gathered(v_buffer, slots),
        attn_mask=mask[:, None, None],
        scale=sm_scale,
    )
    o.copy_(made.reshape(o.shape))


def extend_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: Any,
    v_scale: Any,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_start: Tensor,
    max_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
    tree_mask: Any,
    is_causal: bool,
) -> None:
    """Attend with the new queries of each sequence, `[all of them, heads, size]`, into `o`.

    Sequences of about equal lengths are one padded batch, others go one by one. A bool `tree_mask`
    says which of the new tokens see each other, as many of each sequence. Where nothing came before
    the new tokens, all keys and values are theirs, which need not be as those are cached: of latent
    attention they are of every head.
    """
    plain_only(logit_cap, is_cross, sinks)
    keys, added = seq_lens.tolist(), extend_lens.tolist()
    fresh = k is not None and keys == added
    if fresh:
        k_buffer, v_buffer = k.view(len(q), -1, q.shape[-1]), v.view(len(q), -1, o.shape[-1])
    few_queries = len(keys) * max(added) <= PADDED_QUERIES * sum(added)
    together = few_queries and len(keys) * max(keys) <= PADDED_KEYS * sum(keys)
    everyone = list(range(len(keys)))
    for group in [everyone] if together else [[row] for row in everyone]:
        rows = torch.tensor(group)
        longest = max(keys[row] for row in group)
        if fresh:
            slots = (extend_start[rows, None] + torch.arange(longest)).clamp(max=len(q) - 1)
        else:
            slots = req_to_token[req_pool_indices[rows], :longest].long()
        starts = [int(extend_start[row]) for row in group]
        sizes = [added[row] for row in group]
        padded = q.new_zeros(len(group), max(sizes), *q.shape[1:])
        for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            padded[place, :size] = q[start : start + size]
        mask = seen(seq_lens[rows], extend_lens[rows], longest, max(sizes), window, is_causal)
        if tree_mask is not None:
            tree = tree_mask.view(len(keys), max(sizes), max(sizes))[rows].bool()
            mask &= seen_in_tree(tree, seq_lens[rows], extend_lens[rows], longest)
        keyed, valued = gathered(k_buffer, slots), gathered(v_buffer, slots)
        made = attended(padded, keyed, valued, mask, sm_scale)
        for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            o[start : start + size] = made[place, :size]


def seen(
    keys: Tensor, added: Tensor, width: int, queries: int, window: int, causal: bool
) -> Tensor:
    """Which keys each new query sees, bool `[rows, queries, width]`.

    A padded query sees the first key, so that its softmax, which nobody reads, is defined.
    """
    key = torch.arange(width)[None, None]
    row = torch.arange(queries)[None, :, None]
    ends, counts = keys[:, None, None], added[:, None, None]
    place = ends - counts + row
    mask = key <= place if causal else (key < ends).expand(-1, queries, -1)
    if window > 0:
        mask = mask & (key > place - window)
    return mask | ((row >= counts) & (key == 0))


def attended(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of `q [rows, queries, heads, size]`, the same shape with the values' size."""
    rows, queries, heads, size = q.shape
    groups = keys.shape[1]
    each = heads // groups
    grouped = q.view(rows, queries, groups, each, size).permute(0, 2, 3, 1, 4)
    made = F.scaled_dot_product_attention(
        grouped.reshape(rows, groups, each * queries, size),
        keys,
        values,
        attn_mask=mask.repeat(1, each, 1)[:, None],
        scale=scale,
    )
    made = made.view(rows, groups, each, queries, -1).permute(0, 3, 1, 2, 4)
    return made.reshape(rows, queries, heads, -1)


def plain_only(logit_cap: float, is_cross: bool, sinks: Any) -> None:
    """Refuse variants of attention that are not written here."""
    if is_cross or logit_cap or sinks is not None:
        raise RuntimeError("attention with a cap, sinks or an encoder: use torch_native")


class Operator:
    """What `torch.ops.sgl_kernel.NAME` is: called itself, or as its `default`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.default = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self.default(*args, **kwargs)


for _function in (
    decode_attention_cpu,
    extend_attention_cpu,
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
):
    setattr(torch.ops.sgl_kernel, _function.__name__, Operator(_function))


# Processors of pictures import models that look these up; none of them calls one.
LOOKED_UP = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_mul_cpu",
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} cannot run on this CPU")

    missing.__name__ = name
    return missing


for _name in LOOKED_UP:
    setattr(torch.ops.sgl_kernel, _name, Operator(__getattr__(_name)))
