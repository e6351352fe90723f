"""Rejection: which tokens of another policy's samples a loss leaves out.

Log-probabilities are those of the sampled tokens, padded `[rows, tokens]` with a bool mask.
Nothing here carries a gradient. This file knows neither losses nor normalisers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflow.ops.math.losses.clipped import log_ratio
from rlflow.ops.math.masked import select


@torch.no_grad()
def divergence(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, *, statistic: str, over: str = "token"
) -> Tensor:
    """How far apart the two policies are, for every token, `[rows, tokens]`; 0 where masked.

    With `x = proximal - behaviour` of a token, held within +-20:

        k1   x             log of pi_prox / pi_behave
        k2   x^2 / 2
        k3   e^x - 1 - x   the estimate of KL(pi_behave || pi_prox) that is never negative

    `over` says of what: `token`, or for each token of a row the row's `row-sum`, `row-mean`
    (over its unmasked tokens) or `row-max`. A row without a token has 0.

    Source: Liu et al. 2025, richardli.xyz/rl-collapse; Schulman, joschu.net/blog/kl-approx.
    Others: verl's k1 has the opposite sign, log of pi_behave / pi_prox.
    """
    x = log_ratio(proximal, behaviour, mask)
    if statistic == "k2":
        x = 0.5 * x.square()
    elif statistic == "k3":
        x = x.expm1() - x
    elif statistic != "k1":
        raise ValueError(f"no statistic is called {statistic!r}")
    if over == "token":
        return x
    return select(_of_rows(x, mask, over).unsqueeze(-1).expand_as(x), mask)


def _of_rows(x: Tensor, mask: Tensor, over: str) -> Tensor:
    """One number a row, of values that are 0 where masked."""
    total = x.sum(-1, dtype=torch.float64)
    if over == "row-sum":
        return total.to(x.dtype)
    if over == "row-mean":
        return (total / mask.sum(-1).clamp(min=1)).to(x.dtype)
    if over == "row-max":
        return x.amax(-1) if x.shape[-1] else x.new_zeros(len(x))
    raise ValueError(f"nothing is measured over {over!r}")


@torch.no_grad()
def kept(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    *,
    statistic: str,
    high: float,
    over: str = "token",
    low: float | None = None,
) -> Tensor:
    """The tokens that are kept, bool `[rows, tokens]`, false where masked.

    `k1`: `low <= exp(k1) <= high`, bounds on pi_prox / pi_behave, or on its product or
    geometric mean over a response; `low` is `1 / high` unless given. `k2` and `k3`: at most
    `high`, in nats. Bounds themselves are kept. Several criteria are joined with `&`.

    Others: verl's two bounds "lo_hi" are on the inverse ratio, so they are `low=1 / hi,
    high=1 / lo` here; one bound means the same in both.
    """
    found = divergence(proximal, behaviour, mask, statistic=statistic, over=over)
    if statistic != "k1":
        return mask & (found <= high)
    lowest = -math.log(high) if low is None else math.log(low)
    return mask & (found <= math.log(high)) & (found >= lowest)
