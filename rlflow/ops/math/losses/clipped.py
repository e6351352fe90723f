"""Token losses: a number for every token, before it is averaged into a loss.

All tensors are padded `[rows, tokens]` with a bool mask; log-probabilities are those of
the sampled tokens, float32 or float64. Only `log_probs` and `values` carry a gradient.
Every matrix is 0, with zero gradient, where the mask is false.

This file knows neither normalisers nor coefficients: `aggregate` and `objective` do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.ops.math.masked import clamped, per_token, select

LOG_RATIO_LIMIT = 20.0


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """`log_probs - old_log_probs` held within +-20 so that its exp is finite, 0 where masked.

    Beyond +-20 the gradient is 0; what is not finite is NaN. The difference is selected after
    the subtraction: that is linear, so the NaN of a masked position does not reach the gradient.
    """
    difference = select(log_probs - old_log_probs.detach(), mask)
    return clamped(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), to be minimised.

    `L = max(-A rho, -A clamp(rho, 1 - lo, 1 + hi))`, `rho = exp(log_probs - old_log_probs)`
    and `clip = (lo, hi)`; `hi > lo` is clip-higher (DAPO, arXiv:2503.14476, section 3.1).
    With `dual_clip = c > 1`, `L = min(L, -c A)` where `A < 0` (Ye et al. 2019,
    arXiv:1912.09729): a token that became far more likely stops pulling.

    `advantages` `[rows]` or `[rows, tokens]`. Returns `(token_loss, rho)`, `[rows, tokens]`;
    where masked the loss is 0 and `rho` is 1. At `rho = 1` both arguments of the maximum
    are equal and share the gradient, which is then `-A` in all. Defaults: clip (0.2, 0.2), no
    dual clip.

    Others: verl always has the dual clip, at 3; TRL (`delta`) holds the unclipped ratio below it
    for both signs of `A`, which differs only where `A > 0` and `c < 1 + hi`.
    """
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    return surrogate(ratio, advantages, mask, clip=clip, dual_clip=dual_clip)


def surrogate(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of any ratio `[rows, tokens]`, with that ratio: see `ppo_clip`."""
    low, high = clip
    gain = select(per_token(advantages.detach()), mask)
    cost = -gain
    loss = torch.maximum(cost * ratio, cost * ratio.clamp(1.0 - low, 1.0 + high))
    if dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, cost * dual_clip), loss)
    return loss, ratio


def ppo_clipped(
    ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> Tensor:
    """Where the clipped branch of a surrogate of `ratio` is strictly the larger one, bool."""
    return clipped(ratio, advantages, mask, clip=clip)


@torch.no_grad()
def clipped(
    ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip: tuple[float, float]
) -> Tensor:
    """Where the clipped branch of `ppo_clip` is strictly the larger one, bool `[rows, tokens]`.

    That is `A > 0` with `ratio > 1 + hi`, or `A < 0` with `ratio < 1 - lo`.
    """
    low, high = clip
    excess = ratio - ratio.clamp(1.0 - low, 1.0 + high)
    return select(per_token(advantages) * excess, mask) > 0


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    huber: float | None = None,
) -> Tensor:
    """Squared error of a critic, `[rows, tokens]`, optionally clipped around its old values.

    `L = max((V - G)^2, (clamp(V, V_old - clip, V_old + clip) - G)^2) / 2`, or `(V - G)^2 / 2`
    with `clip=None`, which reads no `old_values`. The half is part of the loss, as in verl
    and OpenRLHF: the gradient is `V - G`. It is 0 where the clipped branch is the larger
    one and V lies outside the range. With `huber = d` an error e beyond d counts as
    `d (|e| - d / 2)` instead of `e^2 / 2` (Huber 1964), in both branches.

    Others: slime has no half; AReaL offers Huber with d = 10.
    """
    value = select(values, mask)
    target = select(returns.detach(), mask)
    error = _half_square(value - target, huber)
    if clip is not None:
        assert old_values is not None, "value_loss with a clip reads the old values"
        old = select(old_values.detach(), mask)
        near = torch.clamp(value, old - clip, old + clip)
        error = torch.maximum(error, _half_square(near - target, huber))
    return error


def _half_square(error: Tensor, huber: float | None) -> Tensor:
    """`error^2 / 2`, or beyond `huber` the line that continues it."""
    square = 0.5 * error.square()
    if huber is None:
        return square
    size = error.abs()
    return torch.where(size <= huber, square, huber * (size - 0.5 * huber))


def nll(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood of the given tokens, `[rows, tokens]`: `-log_probs`."""
    return -select(log_probs, mask)
