"""The policy term of samples that another policy made: weights, and what is left out.

This file knows neither how a token's loss came about nor how losses are averaged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.ops.corrections import ImportanceSampling
from rlflow.ops.losses.losses import Loss, PolicyLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.importance import (
    importance_ratio,
    importance_weight,
    normalized,
    weight_sums,
)
from rlflow.ops.math.losses.regularise import Fields, Metrics, aggregated, largest
from rlflow.ops.math.losses.rejection import kept
from rlflow.ops.math.masked import select

KEPT_TOKENS, KEPT_ROWS = "kept_tokens", "kept_rows"
WEIGHTS, WEIGHED = "weights", "weighed"


def policy_term(
    spec: PolicyLoss,
    token_loss: Tensor,
    proximal: Tensor,
    batch: Fields,
    totals: Totals,
    metrics: Metrics,
) -> Tensor:
    """`token_loss` weighed by the correction of `spec`, what it rejects left out, aggregated.

    Adds the metrics of `corrected`, and with a rejection `rejected`, the share of tokens.
    With `count="kept"` the tokens and rows of the average are those that are kept (a row
    counts unless all its tokens are rejected), from `totals.sums`.
    """
    mask = batch["response_mask"]
    if spec.correction is not None:
        token_loss = corrected(spec.correction, token_loss, proximal, batch, totals, metrics)
    if not spec.rejections:
        return aggregated(spec, token_loss, mask, totals)
    left = kept_tokens(spec, proximal, batch)
    metrics["rejected"] = token_mean((mask & ~left).to(token_loss.dtype), totals)
    if not counts_kept(spec):
        return aggregated(spec, select(token_loss, left), mask, totals)
    counted = Totals(tokens=totals.sums[KEPT_TOKENS], rows=totals.sums[KEPT_ROWS])
    return aggregated(spec, token_loss, left, counted)


def corrected(
    correction: ImportanceSampling,
    token_loss: Tensor,
    proximal: Tensor,
    batch: Fields,
    totals: Totals,
    metrics: Metrics,
) -> Tensor:
    """`token_loss` times the weights of `proximal` against the rollout's log-probs.

    Adds the metrics `importance_mean` (mean weight of a token, before it is normalised),
    `importance_cut` (share of tokens whose weight is not their ratio), `importance_max` (the
    largest ratio) and the hidden mean square of the weights.
    """
    mask = batch["response_mask"]
    ratio, weight = _weights(correction, proximal, batch)
    selected = select(weight, mask).double()
    metrics["importance_mean"] = token_mean(selected, totals)
    metrics["importance_cut"] = token_mean(select(weight != ratio, mask).to(ratio.dtype), totals)
    metrics["importance_max"] = largest(select(ratio, mask))
    metrics["_importance_ww"] = token_mean(selected.square(), totals)
    if correction.normalize:
        weight = normalized(weight, total=totals.sums[WEIGHTS], count=totals.sums[WEIGHED])
    return token_loss * weight


def kept_tokens(spec: PolicyLoss, proximal: Tensor, batch: Fields) -> Tensor:
    """The tokens that every rejection of `spec` keeps, bool `[rows, tokens]`."""
    mask = batch["response_mask"]
    left = mask
    for rule in spec.rejections:
        left = left & kept(
            proximal,
            batch["rollout_log_probs"],
            mask,
            statistic=rule.statistic,
            over=rule.over,
            high=rule.high,
            low=rule.low,
        )
    return left


def counts_kept(spec: PolicyLoss) -> bool:
    """Whether the policy term is averaged over what is kept."""
    return any(rule.count == "kept" for rule in spec.rejections)


@torch.no_grad()
def step_sums(spec: Loss, fields: Callable[[], Fields]) -> dict[str, float]:
    """One part's sums for `Totals.sums` of an optimizer step, in a fixed order.

    They are added up over all parts before the first backward, so they are of fields alone:
    `spec` then has `old="recomputed"`. A loss that needs none has none, and calls no `fields`.
    """
    sums: dict[str, float] = {}
    if not isinstance(spec, PolicyLoss):
        return sums
    normalizes = spec.correction is not None and spec.correction.normalize
    if not normalizes and not counts_kept(spec):
        return sums
    batch = fields()
    if counts_kept(spec):
        mask = batch["response_mask"]
        left = kept_tokens(spec, batch["old_log_probs"], batch)
        sums[KEPT_TOKENS] = float(left.sum())
        sums[KEPT_ROWS] = float((left.any(-1) | ~mask.any(-1)).sum())
    if spec.correction is not None and spec.correction.normalize:
        _, weight = _weights(spec.correction, batch["old_log_probs"], batch)
        level = spec.correction.level
        sums[WEIGHTS], sums[WEIGHED] = weight_sums(weight, batch["response_mask"], level=level)
    return sums


def _weights(
    correction: ImportanceSampling, proximal: Tensor, batch: Fields
) -> tuple[Tensor, Tensor]:
    """The ratios and the weights that follow from them, `[rows, tokens]`."""
    mask, behaviour = batch["response_mask"], batch["rollout_log_probs"]
    ratio = importance_ratio(proximal, behaviour, mask, level=correction.level)
    weight = importance_weight(
        ratio, mode=correction.mode, cap=correction.cap, floor=correction.floor
    )
    return ratio, weight
