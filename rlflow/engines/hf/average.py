"""Exponential moving averages of weights, shard by shard.

Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), with the
weights that fall off exponentially of Tarvainen and Valpola, "Mean teachers are better role
models" (2017, arXiv 1703.01780, section 2). This file knows two sets of shards, and not whose.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlflow.contract.values import Shard


@torch.no_grad()
def move(average: Mapping[str, Shard], source: Mapping[str, Shard], decay: float) -> None:
    """Set w = decay * w + (1 - decay) * theta in place, w of `average` and theta of `source`.

    Computed in w's dtype as w + (1 - decay) * (theta - w), and for decay < 1/2 as
    theta - decay * (theta - w): `Tensor.lerp_`. With decay 0 the bits of theta, with decay 1
    those of w. Nothing is sent: both lie alike, as `difference` has found.
    """
    if decay == 1:
        return
    for name, shard in average.items():
        w, theta = shard.tensor, source[name].tensor
        if decay == 0:
            w.copy_(theta)
        else:
            w.lerp_(theta.to(w.dtype), 1 - decay)


def difference(average: Mapping[str, Shard], source: Mapping[str, Shard]) -> str:
    """In words, where two sets of shards do not lie alike; `` where they do."""
    for name in sorted(average.keys() ^ source.keys()):
        return f"{name} is a weight of one of them only"
    for name, shard in average.items():
        other = source[name]
        if shard.shape != other.shape:
            return f"{name} is {list(shard.shape)} and {list(other.shape)}"
        if shard.box != other.box:
            return f"{name} lies as {list(shard.box)} and as {list(other.box)}"
    return ""
