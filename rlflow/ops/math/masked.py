"""Statistics over the unmasked positions of a tensor.

A masked position holds anything: padding, a tool's token, NaN. It is therefore replaced
before any arithmetic (`select`), never multiplied away, because NaN times zero is NaN in
the value and infinity times zero is NaN in the gradient. Sums run in float64.

This file knows neither what a position stands for nor how it was masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

VARIANCE_EPS = 1e-8


def select(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`x` where `mask` (bool) is true, `fill` elsewhere; both broadcast.

    Done before arithmetic on `x`, it keeps NaN and infinity at masked positions out of
    every value and every gradient.
    """
    return torch.where(mask, x, fill)


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """`x` within `[low, high]`, with gradient 0 beyond; NaN where `x` is not finite.

    A bound alone would make a number of an infinity, and nobody would see that it was one.
    """
    return x.clamp(low, high) + (x - x).detach()


def per_token(x: Tensor) -> Tensor:
    """A `[rows]` tensor as `[rows, 1]`, so that it broadcasts over tokens; others unchanged."""
    return x.unsqueeze(-1) if x.dim() == 1 else x


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype statistics of `x` are returned in: float32, or float64 if `x` is."""
    return torch.promote_types(x.dtype, torch.float32)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over the unmasked entries, 0 at the masked ones.

    The statistics are over all unmasked positions together, so long rows weigh more. The
    epsilon is inside the root. Equal entries give exactly 0; so does a single entry (its
    centred value), where other implementations raise.
    """
    centred = _centred(x, mask)
    scale = (_variance(centred, mask) + VARIANCE_EPS).rsqrt()
    return (centred * scale).to(statistics_dtype(x))


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    """Deviations from the masked mean in float64, 0 where masked.

    Measured from the largest entry first: equal entries then have deviation 0 exactly,
    whatever the rounding of their mean.
    """
    wide = x.double()
    if x.numel() == 0:
        return wide
    largest = select(wide.detach(), mask, -torch.inf).amax()
    offset = select(wide - largest, mask)
    return select(offset - offset.sum() / mask.sum().clamp(min=1), mask)


def _variance(centred: Tensor, mask: Tensor) -> Tensor:
    """Bessel-corrected variance of deviations that are 0 where masked."""
    return centred.square().sum() / (mask.sum() - 1).clamp(min=1)
