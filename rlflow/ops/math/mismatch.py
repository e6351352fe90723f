"""The loss of samples that another policy made: weights, and what to log about the mismatch.

This file knows neither how a token's loss came about nor how losses are averaged.
"""

from __future__ import annotations

from torch import Tensor

from rlflow.ops.corrections import ImportanceSampling
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.importance import importance_ratio, importance_weight
from rlflow.ops.math.masked import select
from rlflow.ops.math.regularise import Fields, Metrics, largest


def corrected(
    correction: ImportanceSampling,
    token_loss: Tensor,
    proximal: Tensor,
    batch: Fields,
    totals: Totals,
    metrics: Metrics,
) -> Tensor:
    """`token_loss` times the weights of `proximal` against the rollout's log-probs.

    Adds the metrics `importance_mean` (mean weight of a token), `importance_cut` (share of
    tokens whose weight is not their ratio) and `importance_max` (the largest ratio).
    """
    mask, behaviour = batch["response_mask"], batch["rollout_log_probs"]
    ratio = importance_ratio(proximal, behaviour, mask, level=correction.level)
    weight = importance_weight(
        ratio, mode=correction.mode, cap=correction.cap, floor=correction.floor
    )
    metrics["importance_mean"] = token_mean(select(weight, mask), totals)
    metrics["importance_cut"] = token_mean(select(weight != ratio, mask).to(ratio.dtype), totals)
    metrics["importance_max"] = largest(select(ratio, mask))
    return token_loss * weight
