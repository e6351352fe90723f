"""Options of losses as type checkers see them.

What each one means is said by the field of its name.
The file is written by tests/ops/test_option_types.py.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from rlflow.ops.controllers import AdaptiveEntropy, AdaptiveKL
from rlflow.ops.corrections import ImportanceSampling, Rejection


class LossOptions(TypedDict, total=False):
    """What `Loss` takes by name."""

    aggregate: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ]
    constant: float | None


class PolicyLossOptions(LossOptions, total=False):
    """What `PolicyLoss` takes by name."""

    clip: float | tuple[float, float]
    dual_clip: float | None
    ratio_max: float
    ratio_min: float | None
    tau: float | tuple[float, float]
    level: Literal["token", "sequence"]
    divergence: float | tuple[float, float]
    beta: float | None
    gamma_positive: float | tuple[float, float]
    gamma_negative: float | tuple[float, float]
    cov_share: float
    cov_range: tuple[float, float]
    cov_coef: float
    top_entropy: float | None
    off_policy_limit: float | None
    off_policy_from: Literal["rollout", "old"]
    kl_coef: float | AdaptiveKL
    kl: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] | Literal["full"]
    kl_unbiased: bool
    entropy_coef: float | AdaptiveEntropy
    old: Literal["auto", "current", "rollout", "recomputed", "loglinear"]
    correction: ImportanceSampling | None
    rejection: Rejection | tuple[Rejection, ...] | None
    response_metrics: bool


class DistillLossOptions(PolicyLossOptions, total=False):
    """What `DistillLoss` takes by name."""

    kind: str
    teacher_kl: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] | None
    teacher_coef: float
    teacher_limit: float | None
    add_advantages: bool
    jsd_beta: float
    log_prob_min: float | None
    tail: bool


class DPOLossOptions(LossOptions, total=False):
    """What `DPOLoss` takes by name."""

    beta: float
    label_smoothing: float
    length: Literal["sum", "mean"]
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"]
    alpha: float
    margin: float
    tau: float
    sft_coef: float
    ld_alpha: float | None
    policy_weights: bool


class RewardModelLossOptions(LossOptions, total=False):
    """What `RewardModelLoss` takes by name."""

    margin_coef: float
    center_coef: float
