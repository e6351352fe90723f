"""Coefficients that follow what is measured: pure functions of plain numbers.

This file knows neither where a number was measured nor where a coefficient is kept.
"""

from __future__ import annotations

import math
import sys

LARGEST_ERROR = 0.2
SMALLEST_FACTOR = 0.2


def adaptive_kl(coef: float, kl: float, *, target: float, horizon: float, n: float) -> float:
    """The KL coefficient after `n` responses of mean divergence `kl` (nats), above 0.

    `coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)` (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2, with `K = n / horizon`). A `kl` that is not finite leaves
    the coefficient as it is. The factor is at least 0.2, which matters where `n` is above
    `4 * horizon`.

    Others: verl 0.9.1 and TRL's PPO have the formula without these two guards: a NaN stays in
    the coefficient for ever, and n > 5 * horizon can make it negative.
    Raises ValueError for a `horizon` or `target` that is not above 0.
    """
    if not horizon > 0 or not target > 0:
        raise ValueError(f"horizon {horizon} and target {target} have to be above 0")
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    changed = coef * max(1.0 + error * n / horizon, SMALLEST_FACTOR)
    return min(max(changed, sys.float_info.min), sys.float_info.max)


def adaptive_entropy(
    coef: float, entropy: float, *, target: float, step: float, low: float, high: float
) -> float:
    """The entropy coefficient after an optimizer step of mean entropy `entropy` (nats).

    `coef + step` where `entropy <= target`, else `coef - step`, within `low` and `high`
    (Skywork-OR1, He et al. 2025, arXiv:2505.22312). An entropy that is not finite leaves it.

    Others: TRL 1.16.0 the same, with 0.005, 0, 1 and a target of 0.2.
    """
    if not math.isfinite(entropy):
        return coef
    return min(max(coef + (step if entropy <= target else -step), low), high)


def gated_entropy(coef: float, entropy: float | None, *, target: float) -> float:
    """The coefficient that acts: 0 while the last `entropy` was above `target`.

    None stands for no optimizer step so far, and lets it act. The entropy is the last step's
    because that of a step is known when its gradient is made.
    """
    return 0.0 if entropy is not None and entropy > target else coef
