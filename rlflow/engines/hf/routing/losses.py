"""Losses of a router as shares of one optimizer step, which add up however it is cut.

A layer's router gives each token t a score for each of E experts and sends it to k of them. With
`w_t` the number of rows that token t is part of, T the sum of those over the whole step, f_i the
share of tokens that chose expert i (they add up to k) and p_i(t) the router's probability:

    balance = E * sum_i f_i P_i,  P_i = sum_t w_t p_i(t) / T
    z       = sum_t w_t logsumexp(logits_t)^2 / T

The first is Fedus et al., "Switch Transformer" (arXiv:2101.03961), equations 4 to 6, for k experts
as transformers has it: k where all are chosen alike. The second is Zoph et al., "ST-MoE"
(arXiv:2202.08906), equation 5. f has no gradient, and given f both are sums over tokens. This file
knows neither models nor how a batch is cut.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scores = Literal["softmax", "sigmoid"]


def router_probabilities(logits: Tensor, scores: Scores) -> Tensor:
    """A router's probabilities `[tokens, experts]`, float32 at least.

    Of a router that scores by `sigmoid` the scores over their sum (DeepSeek-V3, arXiv:2412.19437,
    equation 19).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scores == "softmax":
        return wide.softmax(-1)
    given = wide.sigmoid()
    return given / given.sum(-1, keepdim=True)


def squared_partition(logits: Tensor) -> Tensor:
    """`logsumexp(logits)^2` of each token `[tokens]`, float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1).square()


def loads(chosen: Tensor, uses: Tensor, experts: int) -> Tensor:
    """How many tokens chose each expert, float64 `[experts]`.

    `chosen` int64 `[tokens, k]`; `uses` `[tokens]` says how many rows each token counts for.
    """
    found = torch.zeros(experts, dtype=torch.float64, device=chosen.device)
    times = uses.double().repeat_interleave(chosen.shape[1])
    return found.index_add_(0, chosen.flatten(), times)


def imbalance(of_layers: Tensor) -> Tensor:
    """The largest load of each layer over its mean, `[layers]`; 1 where all experts have as many.

    `of_layers` `[layers, experts]`. A layer without a token has 1.
    """
    mean = of_layers.mean(-1)
    return torch.where(mean > 0, of_layers.amax(-1) / mean.clamp(min=1e-300), 1.0)
