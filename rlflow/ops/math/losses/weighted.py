"""Losses of single tokens that weigh their log-prob, or bend their ratio, instead of clipping it.

Shapes and masks as in `clipped`; `rho = exp(log_probs - old_log_probs)`, its log held within
+-20. Each returns `(token_loss, rho)`, `[rows, tokens]`, where masked 0 and 1. The functions
named `*_clipped` and `*_outside` take the ratio as well and say where a token's weight was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.ops.math.losses.clipped import log_ratio
from rlflow.ops.math.losses.sequence import mean_ratio
from rlflow.ops.math.masked import per_token, select

PROBABILITY_EPS = 1e-8


def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """`L = -A log_probs` (Williams 1992; as GPG Chu et al. 2025, arXiv:2504.02546, eq. 8).

    The old policy is not part of it: `rho` is returned for the metrics, without gradient.
    Others: the same in verl (`gpg`, and `reinforce` with importance weights).
    """
    gain = select(per_token(advantages.detach()), mask)
    return -gain * select(log_probs, mask), _ratio(log_probs, old_log_probs, mask)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_max: float,
    ratio_min: float | None = None,
    level: str = "token",
) -> tuple[Tensor, Tensor]:
    """`L = -sg(clamp(rho, ratio_min, ratio_max)) A log_probs` (arXiv:2506.13585, eq. 4 and 5).

    Every token keeps a gradient, also those that `ppo_clip` drops. The bounds are absolute: a
    ratio may not exceed `ratio_max`, 5 by default (arXiv:2510.13786); as in the paper there is
    no lower bound unless `ratio_min` is given. `level="sequence"` takes the row's
    `exp(mean_t log rho_t)` (GSPO, arXiv:2507.18071, eq. 7) for each of its tokens.

    Others: verl's bounds are distances from 1, `ratio_max = 1 + clip_ratio_high` and
    `ratio_min = 1 - clip_ratio_low`, both 0.2 by default; TRL's `epsilon_high` is `ratio_max`, and
    its `importance_sampling_level` is the level. verl has the level of tokens alone.
    """
    ratio = _ratio(log_probs, old_log_probs, mask, level)
    gain = select(per_token(advantages.detach()), mask)
    return -ratio.clamp(ratio_min, ratio_max) * gain * select(log_probs, mask), ratio


def cispo_clipped(
    ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_max: float,
    ratio_min: float | None = None,
    level: str = "token",
) -> Tensor:
    """Where `cispo` cuts the ratio, bool `[rows, tokens]`."""
    return select(ratio != ratio.clamp(ratio_min, ratio_max), mask, False)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau: tuple[float, float],
    level: str = "token",
) -> tuple[Tensor, Tensor]:
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347, eq. 5 to 7).

    `L = -A (4 / tau) sigmoid(tau (rho - 1))`, `tau = (positive, negative)`: the first where
    `A > 0`, the second elsewhere, (1.0, 1.05) by default. On-policy the gradient is that of
    `-A rho`. The gate takes the place of clipping. Averaged by seq-mean-token-mean unless said
    otherwise, as in the paper. With `level="sequence"` rho is the row's `exp(mean_t log rho_t)`,
    with the gradient of `mean_ratio`: averaged so, the loss is the gate of one ratio a response.
    Others: verl and TRL always average so; the loss is the same. The level is TRL's
    `importance_sampling_level`.
    """
    ratio = _of_level(log_probs, old_log_probs, mask, level)
    gain = select(per_token(advantages.detach()), mask)
    positive, negative = (torch.full_like(ratio, value) for value in tau)
    steepness = torch.where(gain > 0, positive, negative)
    return -gain * (steepness * (ratio - 1.0)).sigmoid() * (4.0 / steepness), ratio


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: tuple[float, float],
    ratio_max: float,
) -> tuple[Tensor, Tensor]:
    """Divergence PPO with the binary total variation (Qi et al. 2026, arXiv:2602.04879).

    `L = -A sg(min(rho, ratio_max)) log_probs` where a token is inside its trust region, else 0:
    inside, with `divergence = (lo, hi)`, is `pi - pi_old <= hi` where `A > 0`, and
    `pi - pi_old >= -lo` elsewhere. Default (0.15, 0.15), and `ratio_max` 20.

    Others: in verl the bounds are `clip_ratio_low` and `clip_ratio_high`, and `ratio_max` is
    `clip_ratio_c`, whose default is in effect 3.
    """
    ratio = _ratio(log_probs, old_log_probs, mask)
    given = (ratio, log_probs, old_log_probs, advantages, mask)
    outside = dppo_tv_outside(*given, divergence=divergence, ratio_max=ratio_max)
    return _trusted(ratio, log_probs, advantages, mask & ~outside, ratio_max), ratio


@torch.no_grad()
def dppo_tv_outside(
    ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: tuple[float, float],
    ratio_max: float,
) -> Tensor:
    """Where `dppo_tv` drops a token, bool `[rows, tokens]`."""
    low, high = divergence
    moved = select(log_probs, mask).exp() - select(old_log_probs, mask).exp()
    gain = select(per_token(advantages), mask)
    return ~torch.where(gain > 0, moved <= high, moved >= -low) & mask


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: tuple[float, float],
    ratio_max: float,
) -> tuple[Tensor, Tensor]:
    """Divergence PPO with the binary KL (Qi et al. 2026, arXiv:2602.04879).

    As `dppo_tv`, where inside is: the KL of (pi_old, 1 - pi_old) from (pi, 1 - pi) is at most
    `hi` where `A > 0` (`lo` elsewhere), or the token moved the other way: `pi <= pi_old` where
    `A > 0`, `pi >= pi_old` elsewhere. Default (0.05, 0.05), and `ratio_max` 20. Inside the log
    of `(1 - pi_old) / (1 - pi)`, 1e-8 is added to both. Others: as in `dppo_tv`.
    """
    ratio = _ratio(log_probs, old_log_probs, mask)
    given = (ratio, log_probs, old_log_probs, advantages, mask)
    outside = dppo_kl_outside(*given, divergence=divergence, ratio_max=ratio_max)
    return _trusted(ratio, log_probs, advantages, mask & ~outside, ratio_max), ratio


@torch.no_grad()
def dppo_kl_outside(
    ratio: Tensor,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: tuple[float, float],
    ratio_max: float,
) -> Tensor:
    """Where `dppo_kl` drops a token, bool `[rows, tokens]`."""
    low, high = divergence
    new, old = (select(x, mask).clamp(max=0.0) for x in (log_probs, old_log_probs))
    rest, old_rest = -new.expm1() + PROBABILITY_EPS, -old.expm1()
    kl = old.exp() * (old - new) + old_rest * ((old_rest + PROBABILITY_EPS) / rest).log()
    gain = select(per_token(advantages), mask)
    up, down = ~(kl <= high) & ~(new <= old), ~(kl <= low) & ~(new >= old)
    return torch.where(gain > 0, up, down) & mask


def dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Direct reward optimization (Richemond et al. 2024, arXiv:2405.19107, section 3).

    `L = -(A log_probs - beta / 2 (log_probs - old_log_probs)^2)`: the gradient is that of
    `beta / 2 (log rho - A / beta)^2`, a regression of the log-ratio to `A / beta`, token by
    token. `beta > 0` has no default. The log-ratio is not held. Others: the same in verl.
    """
    difference = select(log_probs - old_log_probs.detach(), mask)
    gain = select(per_token(advantages.detach()), mask)
    loss = 0.5 * beta * difference.square() - gain * select(log_probs, mask)
    return loss, _ratio(log_probs, old_log_probs, mask)


def _trusted(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, inside: Tensor, ratio_max: float
) -> Tensor:
    """The loss of tokens inside their trust region, with truncated weights."""
    gain = select(per_token(advantages.detach()), inside)
    return -select(ratio, inside).clamp(max=ratio_max) * gain * select(log_probs, inside)


@torch.no_grad()
def _ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """`rho` without gradient, 1 where masked."""
    return _of_level(log_probs, old_log_probs, mask, level)


def _of_level(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, level: str) -> Tensor:
    """The ratio of each token, or that of its row."""
    if level == "sequence":
        return mean_ratio(log_probs, old_log_probs, mask)
    return log_ratio(log_probs, old_log_probs, mask).exp()
