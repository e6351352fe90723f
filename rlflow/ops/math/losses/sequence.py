"""Losses whose ratio belongs to a response: one number for all tokens of a row.

Shapes and masks as in `clipped`. The means and sums over a row are of its unmasked tokens, in
float64; an empty row has ratio 1 and no loss. What a token's loss adds up to over a row is for
the aggregation to say.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflow.ops.math.losses.clipped import LOG_RATIO_LIMIT, surrogate
from rlflow.ops.math.masked import clamped, per_token, select

SMALLEST_SEQUENCE_RATIO = 1e-8


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over the unmasked tokens of each row, `[rows, 1]`; 0 for an empty row."""
    total = select(x, mask).sum(-1, keepdim=True, dtype=torch.float64)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype)


def mean_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """`s = exp(mean_t (log_probs - old_log_probs))` of its row for every token, 1 where masked.

    The gradient of a token is that of `sg(s) pi_t / sg(pi_t)`, `s grad log_probs_t`: the mean over
    the tokens of a row is the gradient of `s`. The log of `s` is held within +-20, and beyond its
    gradient is 0.
    """
    mean = row_mean(log_probs.detach() - old_log_probs.detach(), mask)
    current = select(log_probs, mask & (mean.abs() <= LOG_RATIO_LIMIT))
    ratio = (current - current.detach()).exp()
    ratio = ratio * clamped(mean, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return select(ratio, mask, 1.0)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071, section 4).

    `s = exp(mean_t (log_probs - old_log_probs))`, the mean over the row, and
    `L = max(-A s, -A clamp(s, 1 - lo, 1 + hi))` for every token of it. The gradient is that of
    GSPO-token (section 4.3), `s_t = sg(s) pi_t / sg(pi_t)`: `s grad log_probs_t`. Under every
    aggregation the tokens of a row then add up to the gradient of `s` itself where `advantages`
    are one number a row, `[rows]`; with `[rows, tokens]` this is GSPO-token proper.

    Length-unbiased LUSPO (arXiv:2602.05261) is this loss summed over the tokens of a row.
    Default clip (3e-4, 4e-4), of the paper's section 5.1; LUSPO (2e-3, 2.5e-3), of its. Averaged
    by seq-mean-token-mean unless said otherwise. The log of `s` is held within +-20, and
    beyond its gradient is 0. Returns `(token_loss, s)`, `[rows, tokens]`; where masked 0 and 1.

    Others: verl averages by its own default, token-mean, and holds `log s` below 10; TRL
    (`importance_sampling_level="sequence"`) agrees in value and gradient.
    """
    ratio = mean_ratio(log_probs, old_log_probs, mask)
    return surrogate(ratio, advantages, mask, clip=clip, dual_clip=dual_clip)


def sequence_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the ratio of a whole response, which is one action.

    `W = exp(sum_t (log_probs - old_log_probs))`, not normalised by the length, and
    `L = max(-A W, -A clamp(W, 1 - lo, 1 + hi)) / T` for each of the T tokens of the row, so that
    seq-mean-token-sum is the mean over rows of the surrogate of W, with gradient
    `-A W grad log_probs_t` inside the clip range. The surrogate is Schulman et al. 2017,
    arXiv:1707.06347, eq. 7; a response as one action is RLOO, Ahmadian et al. 2024,
    arXiv:2402.14740, whose REINFORCE gradient this has on-policy. With `dual_clip = c > 1`,
    `L = min(L, -c A / T)` where `A < 0`.

    `advantages` `[rows]`. Defaults: clip (0.2, 0.2), no dual clip. The log of W is held within
    +-20; beyond its gradient is 0. Returns `(token_loss, W)`, `[rows, tokens]`; where masked 0
    and 1. Others: the loss of TRL 1.16.0's RLOO trainer, which does not hold the log of W and has
    -A, without a gradient, for an empty row.
    """
    difference = select(log_probs - old_log_probs.detach(), mask)
    total = difference.sum(-1, keepdim=True, dtype=torch.float64)
    ratio = clamped(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(log_probs.dtype)
    ratio = select(ratio.expand_as(difference), mask, 1.0)
    loss, _ = surrogate(ratio, advantages, mask, clip=clip, dual_clip=dual_clip)
    return loss / mask.sum(-1, keepdim=True).clamp(min=1), ratio


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv:2507.20673, eq. 4).

    With `d = log_probs - old_log_probs`, `c = min(d, hi)` where `A > 0`, `max(d, -lo)` where
    `A < 0`, 0 where `A = 0`: `L = -mean_t(A) exp(mean_t c)`, the same number for every token of
    the row, so that seq-mean-token-mean is the mean over rows of the paper. `clip = (lo, hi)` is
    in logs, (0.4, 0.4) by default. `advantages` `[rows]`, or `[rows, tokens]`, whose signs then
    decide token by token. The mean of `c` is held within +-20.

    Returns `(token_loss, exp(mean_t c))`, `[rows, tokens]`; where masked 0 and 1.
    Others: verl (`geo_mean`) and TRL agree; verl joins importance weights by their geometric
    mean over the row, here each token has its own weight.
    """
    low, high = clip
    gain = select(per_token(advantages.detach()), mask)
    difference = select(log_probs - old_log_probs.detach(), mask)
    above, below = clamped(difference, -math.inf, high), clamped(difference, -low, math.inf)
    within = torch.where(gain > 0, above, below)
    mean = row_mean(select(within, gain != 0), mask)
    mean = clamped(mean, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = mean.exp()
    loss = select((-row_mean(gain, mask) * ratio).expand_as(difference), mask)
    return loss, select(ratio.expand_as(difference), mask, 1.0)


@torch.no_grad()
def gmpo_clipped(
    ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
) -> Tensor:
    """Where `gmpo` holds a token's log-ratio, bool `[rows, tokens]`."""
    low, high = clip
    difference = select(log_probs - old_log_probs, mask)
    gain = select(per_token(advantages), mask)
    return ((gain > 0) & (difference > high)) | ((gain < 0) & (difference < -low))


def vespo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    gamma_positive: tuple[float, float],
    gamma_negative: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Variational sequence-level soft policy optimization (arXiv:2602.10693).

    With the ratio of the whole response `W = exp(sum_t (log_probs - old_log_probs))` and
    `phi(W) = W^k exp(lam (1 - W))`: `L = -phi(W) A log_probs`, where `phi` carries no gradient.
    `phi(1) = 1`. `(k, lam)` is `gamma_positive` where `A >= 0`, (2, 3) by default, and
    `gamma_negative` elsewhere, (3, 2). The log-ratio of a token is held within +-20, that of the
    row between log 1e-8 and 20.

    Returns `(token_loss, W)`, `[rows, tokens]`; where masked 0 and 1. Others: TRL multiplies the
    weights of its rollout engine into `W`; here that is `old="rollout"`.
    """
    with torch.no_grad():
        difference = select(log_probs - old_log_probs, mask)
        by_token = clamped(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        total = by_token.sum(-1, keepdim=True, dtype=torch.float64)
        log_ratio = clamped(total, math.log(SMALLEST_SEQUENCE_RATIO), LOG_RATIO_LIMIT)
        gain = select(per_token(advantages), mask)
        power, rate = (
            torch.where(gain >= 0, total.new_tensor(positive), total.new_tensor(negative))
            for positive, negative in zip(gamma_positive, gamma_negative, strict=True)
        )
        ratio = log_ratio.exp()
        log_weight = (power * log_ratio + rate * (1.0 - ratio)).clamp(max=LOG_RATIO_LIMIT)
        weight = log_weight.exp().to(log_probs.dtype)
    loss = -weight * gain * select(log_probs, mask)
    shown = ratio.to(log_probs.dtype).expand_as(log_probs)
    return loss, select(shown, mask, 1.0)
