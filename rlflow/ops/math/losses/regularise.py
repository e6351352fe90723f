"""What a policy loss is regularised by: a divergence from the reference, and the entropy.

This file knows no policy loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlflow.ops.losses.losses import Loss, PolicyLoss
from rlflow.ops.math.aggregate import Totals, aggregate, token_mean
from rlflow.ops.math.kl import full_kl, token_kl
from rlflow.ops.math.losses.clipped import log_ratio
from rlflow.ops.math.masked import select

Fields = Mapping[str, Tensor]
Metrics = dict[str, Tensor]


def regularised(
    spec: PolicyLoss,
    loss: Tensor,
    old: Tensor,
    outputs: Fields,
    batch: Fields,
    totals: Totals,
    metrics: Metrics,
) -> Tensor:
    """`loss` with the KL and entropy terms that have a coefficient; adds their metrics.

    An adaptive coefficient that was not replaced by what it is at this step is its first one.
    `kl="full"` sums over the vocabulary, in the order of the reference's `top_log_probs`.
    With `kl_unbiased` the estimate of each token is times `pi / pi_old`, which carries a
    gradient: `E_old[rho k3]` is the KL of the current policy, and `grad rho k3 = rho x` is that
    of the reverse KL also where samples are older (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Others: TRL 1.16.0 does so by default; verl 0.9.1 has "k3+", the same on-policy. TRL takes
    the entropy's mean over the tokens of a micro-batch; here it is averaged as the loss is.
    """
    mask = batch["response_mask"]
    kl_coef = spec.kl_coef if isinstance(spec.kl_coef, float) else spec.kl_coef.init
    entropy_coef = spec.entropy_coef
    entropy_coef = entropy_coef if isinstance(entropy_coef, float) else entropy_coef.init
    if spec.kl_coef or "ref_log_probs" in batch:
        if spec.kl == "full":
            kl = full_kl(outputs["log_probs_at"], batch["top_log_probs"], mask)
        else:
            kl = token_kl(outputs["log_probs"], batch["ref_log_probs"], mask, kind=spec.kl)
        if spec.kl_unbiased:
            kl = kl * log_ratio(outputs["log_probs"], old, mask).exp()
        metrics["kl"] = token_mean(kl.detach(), totals)
        if kl_coef:
            loss = loss + kl_coef * aggregated(spec, kl, mask, totals)
    if spec.entropy_coef or "entropy" in outputs:
        entropy = select(outputs["entropy"], mask)
        metrics["entropy"] = token_mean(entropy.detach(), totals)
        if entropy_coef:
            loss = loss - entropy_coef * aggregated(spec, entropy, mask, totals)
    return loss


def aggregated(spec: Loss, token_values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """`aggregate` with the mode and the constant of `spec`."""
    return aggregate(token_values, mask, totals, mode=spec.aggregate, constant=spec.constant)


def largest(x: Tensor) -> Tensor:
    """The largest entry of a tensor that is nowhere negative; 0 if it has none."""
    return x.amax() if x.numel() else x.new_zeros(())
