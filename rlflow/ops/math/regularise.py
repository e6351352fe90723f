"""What a policy loss is regularised by: a divergence from the reference, and the entropy.

This file knows no policy loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlflow.ops.losses import Loss, PolicyLoss
from rlflow.ops.math.aggregate import Totals, aggregate, token_mean
from rlflow.ops.math.kl import token_kl
from rlflow.ops.math.masked import select

Fields = Mapping[str, Tensor]
Metrics = dict[str, Tensor]


def regularised(
    spec: PolicyLoss,
    loss: Tensor,
    outputs: Fields,
    batch: Fields,
    totals: Totals,
    metrics: Metrics,
) -> Tensor:
    """`loss` with the KL and entropy terms that have a coefficient; adds their metrics."""
    mask = batch["response_mask"]
    if spec.kl_coef or "ref_log_probs" in batch:
        kl = token_kl(outputs["log_probs"], batch["ref_log_probs"], mask, kind=spec.kl)
        metrics["kl"] = token_mean(kl.detach(), totals)
        if spec.kl_coef:
            loss = loss + spec.kl_coef * aggregated(spec, kl, mask, totals)
    if spec.entropy_coef or "entropy" in outputs:
        entropy = select(outputs["entropy"], mask)
        metrics["entropy"] = token_mean(entropy.detach(), totals)
        if spec.entropy_coef:
            loss = loss - spec.entropy_coef * aggregated(spec, entropy, mask, totals)
    return loss


def aggregated(spec: Loss, token_values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """`aggregate` with the mode and the constant of `spec`."""
    return aggregate(token_values, mask, totals, mode=spec.aggregate, constant=spec.constant)


def largest(x: Tensor) -> Tensor:
    """The largest entry of a tensor that is nowhere negative; 0 if it has none."""
    return x.amax() if x.numel() else x.new_zeros(())
