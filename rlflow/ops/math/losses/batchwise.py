"""Losses that join rows which are computed apart: of pairs, and of whole optimizer steps.

A loss L of a row's output x only needs its slope dL/dx, a constant, for that row's exact
gradient: `slope * x` has it, whatever L is and wherever the other rows are. So a pass without
gradient over the whole mini-batch gives every row its slopes, and each row is then trained by
itself, in any micro-batch and on any rank. The sum over the rows of what they share is L.

This file knows losses and columns of numbers; neither models nor processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlflow.ops.math.losses.preference import (
    pairwise_reward_loss,
    pointwise_reward_loss,
    preference_loss,
    sequence_log_probs,
    token_weights,
)
from rlflow.ops.math.masked import select
from rlflow.ops.math.pairs import pair_rows

if TYPE_CHECKING:
    from rlflow.ops.losses.preference import BatchwiseLoss, DPOLoss, RewardModelLoss
    from rlflow.ops.math.aggregate import Totals

Fields = Mapping[str, Tensor]
Metrics = dict[str, Tensor]

Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(ids [n], columns [n, k]) -> (rows of all parts [N, k] by ascending id, own places [n])`."""

SLOPES, SHARES = "loss_slopes", "loss_shares"


def alone(ids: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The `Gather` of one who has all rows."""
    order = torch.argsort(ids)
    return columns[order], torch.argsort(order)


def batchwise_objective(
    spec: BatchwiseLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """The share of a loss that the rows of a micro-batch have, with its exact gradient.

    `batch`: `response_mask`; `loss_slopes` `[rows, tokens]`, the derivative of the loss of the
    whole mini-batch by the output of each token; `loss_shares` `[rows, 1 + metrics]`, what each
    row adds to the loss and to each of `spec.metrics`. The totals are in the slopes already.
    """
    mask, shares = batch["response_mask"], batch[SHARES]
    x = select(outputs[spec.outputs()[0]], mask)
    pull = select(batch[SLOPES], mask) * (x - x.detach())
    added = shares.sum(0)
    loss = pull.sum() + added[0]
    return loss, dict(zip(spec.metrics, added[1:].detach(), strict=True))


def preference_terms(
    spec: DPOLoss, log_probs: Tensor, fields: Fields, gather: Gather = alone
) -> dict[str, Tensor]:
    """`loss_slopes` and `loss_shares` of a loss of pairs, for rows that hold both sides of each.

    `log_probs` `[rows, tokens]` are the current ones, without gradient; `fields` hold
    `response_mask`, `pair`, `chosen` and where the loss reads them `ref_log_probs` and
    `sum_pi_squared`. The loss is a mean over the pairs of all parts, plus `sft_coef` times the mean
    of `-log p` over the tokens of all chosen responses (Liu et al. 2024, arXiv:2405.16436;
    `rpo_alpha` and `sft` of TRL). Without a pair everything is 0.
    """
    mask, (better, worse) = fields["response_mask"], pair_rows(fields["pair"], fields["chosen"])
    shared = _shared_lengths(mask, better, worse) if spec.ld_alpha is not None else None
    tail_weight = 1.0 if spec.ld_alpha is None else spec.ld_alpha
    weights = token_weights(mask, shared, tail_weight)
    wide = log_probs.double()
    sums = (select(wide, mask) * weights).sum(-1)
    ref = torch.zeros_like(sums)
    if spec.reference:
        ref_log_probs = fields["ref_log_probs"].double()
        ref = sequence_log_probs(ref_log_probs, mask, tail=shared, tail_weight=tail_weight)
    tokens = mask.sum(-1).double()
    plain = select(wide, mask).sum(-1)
    counts = pair_weights(wide, fields["sum_pi_squared"], mask) if spec.policy_weights else ref
    sides = [x[rows] for x in (sums, ref, tokens, plain, counts) for rows in (better, worse)]
    table, own = gather(fields["pair"][better], torch.stack(sides, 1))
    loss, slopes = _pair_losses(spec, table)
    pairs, written = max(len(table), 1), table[:, 4].sum().clamp(min=1)
    row_slopes = torch.zeros_like(sums)
    row_slopes[better], row_slopes[worse] = slopes[own, 0], slopes[own, 1]
    token_slopes = row_slopes[:, None] * weights
    token_slopes[better] -= spec.sft_coef / written * mask[better]
    nll = -table[:, 6] / written
    ratios = spec.beta * (table[:, 0:2] - table[:, 2:4])
    columns = (
        loss / pairs + spec.sft_coef * nll,
        loss / pairs,
        nll,
        torch.ones_like(nll),
        (ratios[:, 0] > ratios[:, 1]).double() / pairs,
        (ratios[:, 0] - ratios[:, 1]) / pairs,
        ratios[:, 0] / pairs,
        ratios[:, 1] / pairs,
    )
    shares = sums.new_zeros(len(sums), len(columns))
    shares[better] = torch.stack(columns, 1)[own]
    return {SLOPES: token_slopes, SHARES: shares}


def pair_weights(log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """How likely the policy is to write each response, `[rows]`, without gradient.

    `w = exp(mean_t (log p_t - log sum_v p_t(v)^2))` over the unmasked tokens: the probability of
    the response, normalised by its length and by what a sample of the policy would have in the
    mean. A pair counts `w_chosen w_rejected` times, so that pairs of another policy count as if
    this one had written them: WPO, Zhou et al. 2024, arXiv:2406.11827, eq. 2 with the alignment
    of section 3.2. 1 for a row without a token. Others: TRL 1.16.0 the same (`use_weighting`).
    """
    aligned = select(log_probs.double() - sum_pi_squared.double().log(), mask)
    return (aligned.sum(-1) / mask.sum(-1).clamp(min=1)).exp()


def score_pair_terms(
    spec: RewardModelLoss, scores: Tensor, fields: Fields, gather: Gather = alone
) -> dict[str, Tensor]:
    """Slopes `[rows]` and shares of the loss of a reward model, from the `scores` of pairs.

    `fields` hold `pair` and `chosen`, and where the loss reads it `pair_margin`. The loss is a
    mean over the pairs of all parts.
    """
    wide, (better, worse) = scores.double(), pair_rows(fields["pair"], fields["chosen"])
    margin = fields["pair_margin"].double() if spec.margin_coef else torch.zeros_like(wide)
    sides = [wide[better], wide[worse], margin[better]]
    table, own = gather(fields["pair"][better], torch.stack(sides, 1))
    leaf = table[:, :2].clone().requires_grad_()
    with torch.enable_grad():
        loss = pairwise_reward_loss(
            leaf[:, 0],
            leaf[:, 1],
            margin=spec.margin_coef * table[:, 2],
            center_coef=spec.center_coef,
        )
    loss, slopes = _differentiated(loss, leaf, len(table))
    pairs, gap = max(len(table), 1), table[:, 0] - table[:, 1]
    columns = (
        loss / pairs,
        loss / pairs,
        torch.ones_like(gap),
        (gap > 0).double() / pairs,
        gap / pairs,
    )
    shares = wide.new_zeros(len(wide), len(columns))
    shares[better] = torch.stack(columns, 1)[own]
    row_slopes = wide.new_zeros(len(wide))
    row_slopes[better], row_slopes[worse] = slopes[own, 0], slopes[own, 1]
    return {SLOPES: row_slopes, SHARES: shares}


def score_terms(
    spec: RewardModelLoss, scores: Tensor, targets: Tensor, rows: float
) -> dict[str, Tensor]:
    """Slopes and shares of the loss of a reward model that fits targets `[rows]`.

    The loss is a mean over the `rows` of all parts.
    """
    leaf = scores.detach().double().requires_grad_()
    with torch.enable_grad():
        loss = pointwise_reward_loss(leaf, targets.double(), kind=spec.kind)
    loss, slopes = _differentiated(loss, leaf, rows)
    columns = (loss, loss, scores.detach().double(), targets.double())
    return {SLOPES: slopes, SHARES: torch.stack(columns, 1) / max(rows, 1.0)}


def _pair_losses(spec: DPOLoss, table: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every pair `[pairs]`, and the slopes of their mean `[pairs, 2]`."""
    leaf = table[:, :2].clone().requires_grad_()
    with torch.enable_grad():
        loss = preference_loss(
            leaf[:, 0],
            leaf[:, 1],
            table[:, 2],
            table[:, 3],
            chosen_tokens=table[:, 4],
            rejected_tokens=table[:, 5],
            **spec.options(),
        )
        if spec.policy_weights:
            loss = loss * table[:, 8] * table[:, 9]
    return _differentiated(loss, leaf, len(table))


def _differentiated(loss: Tensor, leaf: Tensor, count: float) -> tuple[Tensor, Tensor]:
    """Losses `[n]`, detached, and the slopes of their sum over `count`."""
    (slopes,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), slopes / max(count, 1.0)


def _shared_lengths(mask: Tensor, better: Tensor, worse: Tensor) -> Tensor:
    """The length of the shorter response of each row's pair, int64 `[rows]`."""
    lengths = mask.sum(-1)
    shorter = torch.minimum(lengths[better], lengths[worse])
    lengths = lengths.index_copy(0, better, shorter)
    return lengths.index_copy(0, worse, shorter)
