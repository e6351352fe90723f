"""Losses that act on the few tokens whose covariance makes the entropy fall (Clip-Cov, KL-Cov).

The covariance of a token is `(A - mean A)(log_probs - mean log_probs)`, the means over all
unmasked tokens of the optimizer step (Cui et al. 2025, arXiv:2505.22617, section 4.2). Which
tokens are chosen is therefore decided for the whole step, before its micro-batches, from
log-probs without gradient: `clip_cov_chosen` and `kl_cov_chosen` take all its tokens at once,
padded `[rows, tokens]` or in a single row. The losses are given what was chosen.

Others: verl takes means and choice of each micro-batch by itself, so both depend on its size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.ops.math.losses.clipped import clipped, log_ratio, ppo_clip
from rlflow.ops.math.masked import per_token, select

Order = Callable[[int], Tensor]
"""The numbers below n in a random order, int64 `[n]`, always the same for the same step."""


@torch.no_grad()
def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """`(A - mean A)(log_probs - mean log_probs)` of each token, float64, 0 where masked."""
    count = mask.sum().clamp(min=1)
    factors = []
    for x in (per_token(advantages), log_probs):
        wide = select(x.double(), mask)
        factors.append(select(wide - wide.sum() / count, mask))
    return factors[0] * factors[1]


def quota(share: float, count: int) -> int:
    """How many of `count` tokens a share of them is: rounded down, at least one of any."""
    return min(count, max(1, int(share * count)))


@torch.no_grad()
def clip_cov_chosen(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float],
    cov_share: float,
    cov_range: tuple[float, float],
    order: Order,
) -> Tensor:
    """Tokens that Clip-Cov gives no gradient, bool: at random among those of high covariance.

    Candidates have `low < covariance < high` with `cov_range = (low, high)`, (1, 5) by default,
    and are not clipped already by `ppo_clip`. Of N tokens `max(1, floor(cov_share N))` are
    taken, or all candidates if those are fewer; `cov_share` is 2e-4 by default. `order(n)` puts
    n candidates, which stand in the order of the tensor, in a random order.
    """
    low, high = cov_range
    found = covariance(log_probs, advantages, mask)
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    inert = clipped(ratio, advantages, mask, clip=clip)
    places = ((found > low) & (found < high) & mask & ~inert).flatten().nonzero().flatten()
    taken = order(len(places))[: quota(cov_share, int(mask.sum()))]
    return _marked(mask, places[taken])


@torch.no_grad()
def kl_cov_chosen(
    log_probs: Tensor, advantages: Tensor, mask: Tensor, *, cov_share: float
) -> Tensor:
    """Tokens that KL-Cov holds, bool: the `max(1, floor(cov_share N))` of highest covariance.

    `cov_share` is 2e-4 by default. Of equal covariances the first are taken.
    """
    found = select(covariance(log_probs, advantages, mask), mask, -torch.inf).flatten()
    places = found.argsort(descending=True, stable=True)
    return _marked(mask, places[: quota(cov_share, int(mask.sum()))])


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    chosen: Tensor,
    clip: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """`ppo_clip`, and 0 with zero gradient for `chosen` tokens (arXiv:2505.22617, eq. 10).

    Shapes as in `clipped`; `chosen` bool `[rows, tokens]`. Others: the same in verl.
    """
    loss, ratio = ppo_clip(log_probs, old_log_probs, advantages, mask, clip=clip)
    return select(loss, ~chosen), ratio


@torch.no_grad()
def clip_cov_inert(
    ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    chosen: Tensor,
    clip: tuple[float, float],
) -> Tensor:
    """Where `clip_cov` has no gradient, chosen or clipped, bool `[rows, tokens]`."""
    return chosen | clipped(ratio, advantages, mask, clip=clip)


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    chosen: Tensor,
    cov_coef: float,
) -> tuple[Tensor, Tensor]:
    """`-A rho`, unclipped, + `cov_coef |log rho|` for `chosen` tokens (arXiv:2505.22617, eq. 12).

    Shapes as in `clipped`; `chosen` bool `[rows, tokens]`; `cov_coef` 1 by default. In the
    penalty the log-ratio is not held. Others: verl's coefficient is 1 in its documentation and
    0.1 in its configuration.
    """
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    gain = select(per_token(advantages.detach()), mask)
    apart = select(log_probs - old_log_probs.detach(), mask & chosen).abs()
    return cov_coef * apart - gain * ratio, ratio


def _marked(mask: Tensor, places: Tensor) -> Tensor:
    """True at the flat `places` of a tensor shaped as `mask`, and false elsewhere."""
    marked = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    marked[places.to(mask.device)] = True
    return marked.view(mask.shape) & mask
