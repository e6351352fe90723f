"""Per-token estimators of the divergence of a policy from a reference.

With `x = log_probs - ref_log_probs` of the sampled token (Schulman, "Approximating KL
divergence", joschu.net/blog/kl-approx):

    kind   value              gradient in log_probs
    k1     x                  1            (expectation 0: no use as a loss)
    abs    |x|                sign x
    k2     x^2 / 2            x            (that of the reverse KL, on-policy)
    k3     e^-x + x - 1       1 - e^-x
    k+     that of k          x            (straight-through: the gradient of k2)

In k3, -x is held within +-20 and the value within +-10, with gradient 0 beyond; the others
are not held. `full_kl` is no estimate: it sums over the vocabulary. This file knows neither
coefficients nor whether a KL goes into the reward or into the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.ops.math.losses.clipped import LOG_RATIO_LIMIT
from rlflow.ops.math.masked import clamped, select

K3_LIMIT = 10.0


def k1(difference: Tensor) -> Tensor:
    """`x`: unbiased, may be negative."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """`|x|`."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """`x^2 / 2`: its gradient is that of the reverse KL, on-policy."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """`e^-x + x - 1`: unbiased and never negative; held within its limits."""
    negative = clamped(-difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return clamped(negative.expm1() - negative, -K3_LIMIT, K3_LIMIT)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
}


def token_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, kind: str) -> Tensor:
    """The estimate `kind` for every token, `[rows, tokens]`, 0 where masked.

    `kind` is a name of the table above; a trailing "+" keeps the value and takes the
    gradient of k2. The reference carries no gradient.
    """
    difference = select(log_probs - ref_log_probs.detach(), mask)
    value = ESTIMATORS[kind.removesuffix("+")](difference)
    if not kind.endswith("+"):
        return value
    carrier = k2(difference)
    return carrier - carrier.detach() + value.detach()


def full_kl(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, forward: bool = False
) -> Tensor:
    """The divergence over the whole vocabulary of every token, `[rows, tokens]`, 0 where masked.

    `KL(pi || pi_ref) = sum_v pi (log pi - log pi_ref)`, from log-softmaxes `[rows, tokens,
    vocabulary]`; with `forward` it is `KL(pi_ref || pi)`. A token of probability 0 in the first
    distribution adds 0. Only `log_probs` carries a gradient.

    An expectation instead of a sample of it: no variance, at the price of both distributions.
    Others: verl 0.9.1 names it `full` and does not implement it.
    """
    seen = mask.unsqueeze(-1)
    own, ref = select(log_probs, seen), select(ref_log_probs.detach(), seen)
    first, second = (ref, own) if forward else (own, ref)
    possible = first != -torch.inf
    held = select(first, possible)
    return select(held.exp() * (held - select(second, possible)), possible & seen).sum(-1)
