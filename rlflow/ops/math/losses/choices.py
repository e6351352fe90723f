"""The policy term of the tokens that a loss leaves in it, and what to log about its choices.

What was chosen over all tokens of the optimizer step comes as fields of the batch, `chosen`,
`covariance` and `uncertain`. This file knows neither ratios nor how losses are averaged.
"""

from __future__ import annotations

from torch import Tensor

from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.losses.off_policy import near_policy
from rlflow.ops.math.losses.regularise import Fields, Metrics
from rlflow.ops.math.masked import select


def left_in(
    spec: PolicyLoss,
    token_loss: Tensor,
    log_probs: Tensor,
    old: Tensor,
    batch: Fields,
    totals: Totals,
    metrics: Metrics,
) -> Tensor:
    """`token_loss`, 0 with zero gradient for the tokens that `spec` leaves out.

    Adds, as shares of all tokens, `off_policy_dropped` (by `off_policy_limit`) and
    `entropy_kept` (by `top_entropy`); and where tokens were chosen by their covariance its mean,
    `covariance`, and the share that was, `chosen_fraction`.
    """
    mask = batch["response_mask"]
    if "covariance" in batch:
        metrics["covariance"] = token_mean(select(batch["covariance"], mask), totals)
        chosen = select(batch["chosen"], mask, False)
        metrics["chosen_fraction"] = token_mean(chosen.to(token_loss.dtype), totals)
    if spec.off_policy_limit is not None:
        start = old if spec.off_policy_from == "old" else batch["rollout_log_probs"]
        limit = spec.off_policy_limit
        near = near_policy(log_probs, start, batch["advantages"], mask, limit=limit)
        dropped = (mask & ~near).to(token_loss.dtype)
        metrics["off_policy_dropped"] = token_mean(dropped, totals)
        token_loss = select(token_loss, near)
    if spec.top_entropy is not None:
        uncertain = select(batch["uncertain"], mask, False)
        metrics["entropy_kept"] = token_mean(uncertain.to(token_loss.dtype), totals)
        token_loss = select(token_loss, uncertain)
    return token_loss
