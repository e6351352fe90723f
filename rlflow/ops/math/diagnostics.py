"""How far the trained policy is from the one that sampled, exact over any cut of a batch.

Means over tokens add up over micro-batches and ranks; what is no mean (a share of effective
samples, a correlation) follows from means by `finished`, once they are those of the whole
optimizer step. Means that serve only for that have names beginning with `_`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.losses.clipped import LOG_RATIO_LIMIT
from rlflow.ops.math.masked import select

HIDDEN = "_"
TINY = 1e-24
MOMENTS = ("p", "q", "pp", "qq", "pq")
MEANS = (
    "rollout_gap",
    "rollout_difference",
    "rollout_k3",
    "_rollout_e",
    "_rollout_ee",
    *(f"_rollout_{name}" for name in MOMENTS),
)


RESPONSES = (
    "trained_perplexity",
    "rollout_perplexity",
    "perplexity_ratio",
    "perplexity_gap",
    "chi2_response",
)


@torch.no_grad()
def response_measures(
    trained: Tensor, behaviour: Tensor, mask: Tensor, totals: Totals
) -> dict[str, Tensor]:
    """The share of one part in measures of whole responses, means over those that have a token.

    With l the mean log-prob over a response and S the sum of `x = trained - behaviour`:
    `trained_perplexity` and `rollout_perplexity` are means of exp(-l), `perplexity_ratio` of
    exp(l_behave - l_trained), `perplexity_gap` of |l_behave - l_trained|; `chi2_response` is
    `mean exp(2 S) - 1`, which estimates the chi-squared divergence of the trained policy from the
    one that sampled, the variance of the importance weights of responses. S is held within +-20.
    `perplexity_gap_max` is the largest gap. Hidden: the share of rows with a token. float64.

    Others: the measures of verl 0.9.1 (`training_ppl`, `rollout_ppl`, `ppl_ratio`,
    `log_ppl_abs_diff`, `chi2_seq`), which averages them over micro-batches.
    """
    sizes = mask.sum(-1)
    sums = select(torch.stack([trained, behaviour]), mask).double().sum(-1)
    means = sums / sizes.clamp(min=1)
    apart = means[1] - means[0]
    weight = (sums[0] - sums[1]).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = (*(-means).exp(), apart.exp(), apart.abs(), (2.0 * weight).expm1(), sizes > 0)
    seen = select(torch.stack([value.double() for value in values]), sizes > 0)
    shares = seen.sum(-1) / max(totals.rows, 1.0)
    made = dict(zip((*RESPONSES, "_responses"), shares.unbind(), strict=True))
    largest = apart.abs().amax() if len(sizes) else apart.new_zeros(())
    return made | {"perplexity_gap_max": largest}


@torch.no_grad()
def rollout_measures(
    trained: Tensor, behaviour: Tensor, mask: Tensor, totals: Totals
) -> dict[str, Tensor]:
    """The share of one part in the measures of `x = trained - behaviour` of sampled tokens.

    Means over tokens: `rollout_gap` of |x|, `rollout_difference` of x (minus k1 of
    KL(pi_behave || pi_trained)), `rollout_k3` of e^x - 1 - x, which estimates that KL.
    `rollout_gap_max` is the largest |x|. Hidden: the moments of e^x - 1 and of 1 - p of both
    policies, which keep their digits where the policies agree and are sure. x is held within
    +-20 in exponents. float64 scalars.
    """
    x = select(trained - behaviour, mask).double()
    held = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    excess = held.expm1()
    missed = -select(torch.stack([trained, behaviour]), mask).double().clamp_(max=0.0).expm1_()
    gap, squares = x.abs(), missed.square()
    values = (gap, x, excess - held, excess, excess.square(), *missed, *squares, missed.prod(0))
    means = torch.stack(values).sum((1, 2)) / max(totals.tokens, 1.0)
    made = dict(zip(MEANS, means.unbind(), strict=True))
    return made | {"rollout_gap_max": gap.amax() if gap.numel() else gap.new_zeros(())}


def finished(metrics: Mapping[str, float]) -> dict[str, float]:
    """The measures of a whole optimizer step, of the added-up ones of its parts.

    Adds `rollout_ess` and `importance_ess` (effective samples as a share, `mean(w)^2 /
    mean(w^2)`, of the ratios and of the weights that acted) and `rollout_correlation`
    (Pearson's, of the probabilities of the sampled tokens), where their moments are there;
    leaves the hidden ones out. `rollout_chi2` is `mean(w^2) - 1` of the tokens' ratios, an estimate
    of the chi-squared divergence of the trained policy from the one that sampled. Measures of
    responses become means over those that have a token.

    Others: the measures are those of verl 0.9.1, which averages them over micro-batches.
    """
    made = {name: value for name, value in metrics.items() if not name.startswith(HIDDEN)}
    if "_rollout_ee" in metrics:
        excess, square = metrics["_rollout_e"], metrics["_rollout_ee"]
        made["rollout_chi2"] = 2.0 * excess + square
        made["rollout_ess"] = effective(1.0 + excess, 1.0 + 2.0 * excess + square)
        made["rollout_correlation"] = correlation(*(metrics[f"_rollout_{n}"] for n in MOMENTS))
    if "_importance_ww" in metrics:
        made["importance_ess"] = effective(metrics["importance_mean"], metrics["_importance_ww"])
    if "_responses" in metrics:
        rows = metrics["_responses"]
        made |= {name: metrics[name] / rows if rows else 0.0 for name in RESPONSES}
    return made


def effective(mean: float, square: float) -> float:
    """Effective samples as a share, `mean(w)^2 / mean(w^2)` (Kish 1965), from 0 to 1.

    The same number as `1 / mean((w / mean(w))^2)`; 0 where all weights are.
    """
    return mean * mean / square if square else 0.0


def correlation(p: float, q: float, pp: float, qq: float, pq: float) -> float:
    """Pearson's correlation of two variables from the means of both, their squares and product.

    Where one of them does not vary it is 1 if the two are equal throughout, else 0.
    """
    varied = max(pp - p * p, 0.0), max(qq - q * q, 0.0)
    if min(varied) <= TINY:
        return float(pp - 2.0 * pq + qq <= TINY)
    found = (pq - p * q) / math.sqrt(varied[0] * varied[1])
    return min(max(found, -1.0), 1.0) if math.isfinite(found) else found
