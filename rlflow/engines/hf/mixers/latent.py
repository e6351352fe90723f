"""Multi-head latent attention: a cache of latents, of which keys and values are never made.

A token's keys and values are one linear map of a latent of `kv_lora_rank` numbers, and a rotated
part of the key that all heads share (DeepSeek-V2, arXiv:2405.04434, section 2.1). Whole rows
attend with keys and values made of latents, as the model's own code does. A step of decoding takes
the map into the query and into the output instead (section 2.1.2 and appendix C): with
k_h = [U_h c; r] and v_h = V_h c the score q_n U_h c + q_r r is that of the query [U_h^T q_n; q_r]
on the key [c; r], one for all heads, and the output is V_h of the mixed c. This file knows the
form of a layer, neither models nor caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import PackedAttention, current_state
from rlflow.engines.hf.forward.kernels import product
from rlflow.engines.hf.lora import AdaptedLinear

Made = tuple[Tensor, Tensor]
# What a layer of this kind has in transformers.
PARTS = ("expand_kv", "kv_b_proj", "qk_nope_head_dim", "v_head_dim")


def use_latents(module: nn.Module) -> None:
    """Let the latent attention of a model, where it has such layers, be cached as latents."""
    for layer in module.modules():
        if all(hasattr(layer, part) for part in PARTS):
            latent: Any = layer
            latent.expand_kv = partial(handed_on, latent, latent.expand_kv)
            latent.latent_projection = LatentProjection(latent)


def handed_on(layer: Any, expand: Callable[..., Made], latent: Tensor, rotated: Tensor) -> Made:
    """Keys and values `[1, heads, tokens, size]` of latents and rotated parts `[1, 1, tokens, *]`.

    Those of whole rows, whose cache gets the latents; otherwise the latents in their place,
    `[1, 1, tokens, rank + rotated]` and `[1, 1, tokens, rank]`.
    """
    state = current_state()
    if isinstance(state, PackedAttention) and state.cache is None:
        return expand(latent, rotated)
    both = torch.cat([latent, rotated], -1)
    if not isinstance(state, PackedAttention):
        return both, latent
    state.latents[layer.layer_idx] = both[0].transpose(0, 1)
    return expand(latent, rotated)


class LatentProjection:
    """What the map from latents to keys and values is to queries and outputs of one layer."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def weights(self) -> tuple[Tensor, Tensor]:
        """The maps to keys `[heads, nope, rank]` and to values `[heads, size, rank]`."""
        layer, linear = self.layer, self.layer.kv_b_proj
        weight = linear.weight
        if isinstance(linear, AdaptedLinear) and linear.adapters.active:
            weight = weight + linear.adapters.scale * (linear.lora_B @ linear.lora_A)
        nope, size = layer.qk_nope_head_dim, layer.v_head_dim
        by_head = weight.view(-1, nope + size, weight.shape[-1])
        return by_head[:, :nope], by_head[:, nope:]

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries `[tokens, heads, nope + rotated]` as `[tokens, heads, rank + rotated]`."""
        to_keys, _ = self.weights()
        nope = to_keys.shape[1]
        taken = by_heads(q[..., :nope], to_keys.transpose(1, 2))
        return torch.cat([taken, q[..., nope:]], -1)

    def widened(self, mixed: Tensor) -> Tensor:
        """Outputs `[tokens, heads, size]` of mixed latents `[tokens, heads, rank]`."""
        return by_heads(mixed, self.weights()[1])


def by_heads(x: Tensor, weights: Tensor) -> Tensor:
    """`x [tokens, heads, in]` by each head's weight of `[heads, out, in]`, without gradient.

    On a CPU head by head, so that a row's numbers are its own however many rows there are.
    """
    if x.device.type == "cpu":
        return torch.stack([product(x[:, head], w) for head, w in enumerate(weights)], 1)
    return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)
