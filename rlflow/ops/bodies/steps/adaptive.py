"""Coefficients that follow what is measured, kept from call to call in the state of a node.

A node's state is a small dict of floats, part of every checkpoint. Whoever runs a part of the
node has the same state, because it follows from sums over all parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlflow.ops.controllers import AdaptiveEntropy, AdaptiveKL
from rlflow.ops.losses.losses import Loss, PolicyLoss
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.controllers import adaptive_entropy, adaptive_kl, gated_entropy

State = dict[str, float]
KL, ENTROPY, LAST = "kl_coef", "entropy_coef", "entropy"


def kl_coef(option: float | AdaptiveKL, state: State) -> float:
    """The KL coefficient that acts now."""
    return state.get(KL, option.init) if isinstance(option, AdaptiveKL) else option


def follow_kl(
    option: float | AdaptiveKL, state: State, kl: float, *, tokens: float, rows: float
) -> None:
    """Take note of the mean divergence of so many tokens, in so many responses."""
    if not isinstance(option, AdaptiveKL) or not tokens:
        return
    measured = kl if option.per == "token" else kl * tokens / rows
    state[KL] = adaptive_kl(
        kl_coef(option, state), measured, target=option.target, horizon=option.horizon, n=rows
    )


def entropy_coef(option: float | AdaptiveEntropy, state: State) -> float:
    """The entropy coefficient that acts now."""
    if not isinstance(option, AdaptiveEntropy):
        return option
    return gated_entropy(state.get(ENTROPY, option.init), state.get(LAST), target=option.target)


def follow_entropy(option: float | AdaptiveEntropy, state: State, entropy: float) -> None:
    """Take note of the mean entropy of an optimizer step, if it is a number."""
    if not isinstance(option, AdaptiveEntropy) or not math.isfinite(entropy):
        return
    state[ENTROPY] = adaptive_entropy(
        state.get(ENTROPY, option.init),
        entropy,
        target=option.target,
        step=option.step,
        low=option.low,
        high=option.high,
    )
    state[LAST] = entropy


def at_this_step(spec: Loss, state: State) -> Loss:
    """The loss with numbers for coefficients."""
    return spec.model_copy(update=acting(spec, state))


def acting(spec: Loss, state: State) -> State:
    """The adaptive coefficients of a loss as they act now, by name; empty where none is."""
    if not isinstance(spec, PolicyLoss):
        return {}
    found = {}
    if isinstance(spec.kl_coef, AdaptiveKL):
        found[KL] = kl_coef(spec.kl_coef, state)
    if isinstance(spec.entropy_coef, AdaptiveEntropy):
        found[ENTROPY] = entropy_coef(spec.entropy_coef, state)
    return found


def follow(spec: Loss, state: State, metrics: Mapping[str, float], totals: Totals) -> None:
    """Take note of what an optimizer step that was applied has measured."""
    if not isinstance(spec, PolicyLoss):
        return
    if "kl" in metrics:
        follow_kl(spec.kl_coef, state, metrics["kl"], tokens=totals.tokens, rows=totals.rows)
    if "entropy" in metrics and totals.tokens:
        follow_entropy(spec.entropy_coef, state, metrics["entropy"])
