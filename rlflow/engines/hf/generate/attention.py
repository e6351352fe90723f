"""Attention of new tokens on a cache, without gradient: one of each live row, or several.

Queries are token-major, `[tokens, heads, size]`; what rows have seen lies in the cache's columns.
This file knows neither models nor sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.engines.hf.forward.attention import (
    Traits,
    block_attention,
    probabilities,
    score_traits,
)
from rlflow.engines.hf.generate.cache import KeyValueCache, RaggedCache

# Matrix libraries of a CPU add up so many products one after the other, and more in parts whose
# size depends on how many there are.
PIECE = 192


class DecodeAttention:
    """Attention of one new token per live row on the cache, without gradient."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.routing: object = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """`q [rows, heads, size]` on everything the rows have seen, itself included.

        Rows that are in no band are nobody's, and get zeros.
        """
        keys, values = self.cache.append(layer, k, v)
        seen = keys.shape[2]
        bias = self.cache.bias(q.dtype, traits.window, seen)
        bands = self.cache.bands(seen, min(keys.shape[-1], values.shape[-1]))
        found = [
            attend_columns(
                q[rows],
                keys[rows, :, :columns],
                values[rows, :, :columns],
                bias[rows, :columns],
                traits,
            )
            for rows, columns in bands
        ]
        if nobodys := len(q) - bands[-1][0].stop:
            found.append(q.new_zeros(nobodys, *found[0].shape[1:]))
        return found[0] if len(found) == 1 else torch.cat(found)


def attend_columns(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, traits: Traits) -> Tensor:
    """One query a row, `[rows, heads, size]`, on `keys [rows, kv_heads, columns, size]`.

    `bias [rows, columns]` hides what a row has not seen.
    """
    rows, heads, head_size = q.shape
    kv_heads, seen = keys.shape[1], keys.shape[2]
    queries = q.reshape(rows * kv_heads, heads // kv_heads, head_size)
    scores = torch.bmm(queries, keys.flatten(0, 1).transpose(1, 2)).mul_(traits.scaling)
    scores = score_traits(scores, traits).view(rows, kv_heads, -1, seen)
    scores = scores + bias[:, None, None]
    probs = probabilities(scores.view(rows, heads, 1, seen), traits)
    output = mix_values(probs.reshape(rows * kv_heads, -1, seen), values.flatten(0, 1))
    return output.view(rows, heads, -1)


class RaggedAttention:
    """Attention of equally many new tokens per live row on a cache, without gradient."""

    def __init__(self, cache: RaggedCache) -> None:
        self.cache = cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """`q [rows * span, heads, size]` on what the rows have seen and the span up to each."""
        keys, values = (seen.transpose(1, 2) for seen in self.cache.append(layer, k, v))
        mask = self.cache.sees(traits.window, keys.shape[1])
        queries = q.view(*mask.shape[:2], *q.shape[1:])
        return block_attention(queries, keys, values, mask, traits).flatten(0, 1)


def mix_values(probs: Tensor, values: Tensor) -> Tensor:
    """`probs [batch, repeats, seen] @ values [batch, seen, size]`.

    Whatever `seen` is, a CPU adds in one order, so that what has probability 0 changes nothing.
    """
    seen = probs.shape[2]
    if seen <= PIECE or values.device.type != "cpu":
        return torch.bmm(probs, values)
    output = torch.bmm(probs[:, :, :PIECE], values[:, :PIECE])
    for first in range(PIECE, seen, PIECE):
        piece = slice(first, first + PIECE)
        output += torch.bmm(probs[:, :, piece], values[:, piece])
    return output
