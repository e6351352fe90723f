"""Importance weights: how a sample of one policy counts in the loss of another.

Log-probabilities are those of the sampled tokens, padded `[rows, tokens]` with a bool mask.
Nothing here carries a gradient. This file knows neither losses nor where a policy's
log-probs come from.

    behaviour policy   pi_behave   sampled the tokens; its weights may be older
    proximal policy    pi_prox     the weights when training on the batch began
    current policy     pi          the weights at this optimizer step

Decoupled PPO (Hilton, Cobbe and Schulman 2021, arXiv:2110.00641; AReaL, Fu et al. 2025,
arXiv:2505.24298, section 5.2) is `pi_prox / pi_behave` times the clipped surrogate of
`pi / pi_prox`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.ops.math.losses.clipped import LOG_RATIO_LIMIT, log_ratio
from rlflow.ops.math.masked import clamped, select

SMALLEST_MEAN = 1e-8


@torch.no_grad()
def importance_ratio(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, level: str) -> Tensor:
    """`pi_prox / pi_behave` for every token, `[rows, tokens]`; 1 where masked.

    With `level="sequence"` each unmasked token has the product over the unmasked tokens of
    its row. The log of a ratio, of a token or of a row, is held within +-20.
    """
    if level == "token":
        return log_ratio(proximal, behaviour, mask).exp()
    total = select(proximal - behaviour, mask).sum(-1, keepdim=True, dtype=torch.float64)
    log_weight = clamped(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).to(proximal.dtype)
    return select(log_weight.expand_as(proximal), mask).exp()


@torch.no_grad()
def importance_weight(
    ratio: Tensor, *, mode: str, cap: float, floor: float | None = None
) -> Tensor:
    """The weight of every entry of `ratio`.

    `truncate`: `max(min(ratio, cap), floor)` (Ionides 2008, "Truncated importance sampling"; as a
    fix for rollout engines Yao et al. 2025, fengyao.notion.site/off-policy-rl); without a `floor`
    a weight may be as small as it is. `mask`: `ratio` where
    `floor <= ratio <= cap`, else 0 (IcePop, Ling Team 2025, arXiv:2510.18855).

    Others: off by default in verl 0.9.1 (cap 2, its dataclass says `sequence`), which has no floor
    for truncation; TRL 1.16.0 has it on with vLLM, `level="sequence", mode="mask", cap=3`, and its
    `vllm_importance_sampling_clip_min` is the floor of both modes.
    """
    if mode == "truncate":
        return ratio.clamp(floor, cap)
    kept = ratio <= cap if floor is None else (ratio <= cap) & (ratio >= floor)
    return select(ratio, kept)


@torch.no_grad()
def weight_sums(weight: Tensor, mask: Tensor, *, level: str) -> tuple[float, float]:
    """What the mean weight is of: the sum of one part's weights, and how many there are.

    Of tokens, or with `level="sequence"` of rows that have a token, whatever their length.
    The sums of the parts of an optimizer step are added up.
    """
    weights = select(weight, mask)
    if level == "token":
        return weights.sum(dtype=torch.float64).item(), float(mask.sum())
    sizes = mask.sum(-1)
    means = weights.sum(-1, dtype=torch.float64) / sizes.clamp(min=1)
    return means.sum().item(), float((sizes > 0).sum())


def normalized(weight: Tensor, *, total: float, count: float) -> Tensor:
    """`weight` over the mean weight `total / count` of the optimizer step, after truncation.

    As it is where the mean is at most 1e-8. Others: verl 0.9.1 the same
    (`rollout_is_batch_normalize`), over the batch of one update.
    """
    mean = total / count if count else 0.0
    return weight / mean if mean > SMALLEST_MEAN else weight
