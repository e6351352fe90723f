"""Advantages of rows relative to the other rows of their group: rewards in, advantages out.

`reward` and the results are `[rows]`, a row is one response; `group` is int64 `[rows]`: the rows
of one prompt share an id, wherever they stand. Every token of a row has the row's advantage.
Nothing here carries a gradient. Statistics run in float64; results are float32, or float64 if
the rewards are. Rewards are taken to be finite: the reward op sees to that.

A group of equal rewards (largest = smallest, never deviation = 0) gets exactly 0 where nothing
is whitened. A group of one has no baseline and gets 0, or with `single="reward"` its reward as
if its mean were 0 and its deviation 1.

This file knows neither models nor how a reward came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlflow.ops.math.groups import GroupStatistics, Scale, Single, one_group, whiten_rows
from rlflow.ops.math.masked import select, statistics_dtype

Alpha = Literal["degenerate", "zero_reward", "none"]
Over = Literal["rows", "tokens"]


@torch.no_grad()
def grpo(
    reward: Tensor,
    group: Tensor,
    *,
    std_eps: float = 1e-6,
    scale: Scale = "group",
    single: Single = "zero",
    leave_one_out: bool = False,
) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    `A = (R - mean_g) / (std_g + std_eps)`, standard deviations over n - 1. `scale="batch"`
    divides by the deviation of all rewards instead, `scale="none"` by nothing.
    `leave_one_out` takes the mean of the others in place of the mean.

    A group whose rewards are all equal gets exactly 0. A group of one gets 0, or with
    `single="reward"` its reward over 1 + std_eps. A deviation of level rewards counts as 1.

    Others: TRL has `std_eps=1e-4` and all three scales, verl `std_eps=1e-6` and
    `single="reward"`. NeMo-RL leaves the row out of the deviation too.
    """
    stats = GroupStatistics(reward, group)
    centred = stats.centred(single)
    if leave_one_out:
        centred = stats.alone(centred * _stretch(stats), single)
    return stats.scaled(centred, scale, std_eps).to(statistics_dtype(reward))


@torch.no_grad()
def dr_grpo(reward: Tensor, group: Tensor, *, single: Single = "zero") -> Tensor:
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3.2): `A = R - mean_g`.

    `grpo` without the deviation. The paper's loss divides sums over tokens by a constant:
    `aggregate="seq-mean-token-sum-norm"`.

    Others: verl has `single="reward"`.
    """
    return grpo(reward, group, scale="none", single=single)


@torch.no_grad()
def rloo(
    reward: Tensor,
    group: Tensor,
    *,
    single: Single = "zero",
    whiten: bool = False,
    std_eps: float = 1e-4,
) -> Tensor:
    """REINFORCE leave-one-out advantages (Ahmadian et al. 2024, arXiv:2402.14740).

    `A = R - mean of the other rewards of the group = n / (n - 1) (R - mean_g)`. `whiten` makes
    it `(A - mean) / (std + std_eps)` over all rows, the deviation over N - 1.

    Equal rewards give exactly 0; a group of one gives 0, or with `single="reward"` its reward.

    Others: verl's `rloo` has `single="reward"`, its vectorized form 0. TRL gives 0 and whitens by
    option.
    """
    stats = GroupStatistics(reward, group)
    advantages = stats.alone(stats.centred() * _stretch(stats), single)
    if whiten:
        advantages = _standardised(advantages, single, std_eps)
    return advantages.to(statistics_dtype(reward))


@torch.no_grad()
def opo(reward: Tensor, group: Tensor, mask: Tensor, *, single: Single = "zero") -> Tensor:
    """Optimal reward baseline (Hao et al. 2025, arXiv:2505.23585): weighted by length.

    `A = R - sum_j n_j R_j / sum_j n_j` over the rows j of the group, n_j the unmasked tokens of
    a row, from `mask` `[rows, tokens]`. `sum_j n_j A_j` of a group is 0.

    Equal rewards give exactly 0. A row without a token has no weight; a group without any gets
    0. A group of one gives 0, or with `single="reward"` its reward.

    Others: verl has `single="reward"`, and NaN for a group without a token.
    """
    stats = GroupStatistics(reward, group)
    tokens = mask.sum(-1).double()
    everything = stats.total(tokens)
    baseline = stats.total(tokens * stats.values) / everything.clamp(min=1)
    centred = select(stats.values - baseline, ~stats.level & (everything > 0))
    return stats.alone(centred, single).to(statistics_dtype(reward))


@torch.no_grad()
def gpg(
    reward: Tensor,
    group: Tensor,
    *,
    alpha: Alpha = "degenerate",
    scale: Scale = "none",
    std_eps: float = 1e-6,
    single: Single = "zero",
) -> Tensor:
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546, section 3).

    `A = alpha (R - mean_g) / F` with `alpha = B / (B - M)`, B all rows and M those whose group
    is level: they have no gradient, and the mean over the batch should not shrink for them.
    F is 1, or by `scale` the deviation plus `std_eps`. The loss goes without a ratio and a clip.

    `alpha="zero_reward"` counts rows with reward 0 as M, `alpha="none"` is 1. A group of one
    gives 0 and counts in M, or with `single="reward"` it gives its reward and does not.

    Others: verl has `alpha="zero_reward"` and `single="reward"`: with rewards of 1 and -1 its
    alpha is always 1.
    """
    stats = GroupStatistics(reward, group)
    silent = stats.level & ((stats.size > 1) | (single == "zero"))
    counted = {
        "degenerate": (~silent).sum(),
        "zero_reward": (reward != 0).sum(),
        "none": torch.tensor(len(reward)),
    }[alpha]
    scaled = stats.scaled(stats.centred(single), scale, std_eps)
    return (len(reward) / counted.clamp(min=1).double() * scaled).to(statistics_dtype(reward))


@torch.no_grad()
def pass_at_k(
    reward: Tensor, group: Tensor, *, std_eps: float = 1e-6, scale: Scale = "group"
) -> Tensor:
    """Advantages for the best of a group (Tang et al. 2025, arXiv:2503.19595).

    The objective is the largest reward of a group, and the advantage of a row what the largest
    loses without it: `A = R_1 - R_2` for the best row, the largest reward minus the second
    largest, and 0 for all others. With `scale="group"` it is divided by
    `std_g + std_eps`, with `"batch"` by the deviation of all rewards, with `"none"`, as in the
    paper, by nothing.

    A tie for the best gives exactly 0 to the whole group, and so does a group of one.

    Others: verl divides by the group's deviation unless told otherwise, and refuses a group of
    one.
    """
    stats = GroupStatistics(reward, group)
    best = stats.values == stats.largest(stats.values)
    alone_at_the_top = best & (stats.total(best.double()) == 1) & (stats.size > 1)
    second = stats.largest(select(stats.values, ~best, -torch.inf))
    lead = select(stats.values - second, alone_at_the_top)
    lead = lead + (stats.mean - stats.mean)  # NaN in a group with a reward that is not finite
    return stats.scaled(lead, scale, std_eps).to(statistics_dtype(reward))


@torch.no_grad()
def gdpo(
    rewards: Tensor,
    group: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Sequence[float] | None = None,
    std_eps: float = 1e-6,
    scale: Scale = "group",
    single: Single = "zero",
    whiten: bool = True,
    over: Over = "rows",
) -> Tensor:
    """Several rewards, each normalised by itself (GDPO, Liu et al. 2026, arXiv:2601.05242).

    `S = sum_k weights_k GRPO(R^k)` with the `std_eps`, `scale` and `single` of `grpo`, then
    `A = (S - mean) / (std + std_eps)` over all rows, or with `over="tokens"`
    `(S - mean) / sqrt(var + 1e-8)` over all unmasked tokens of `mask` `[rows, tokens]`, so
    that long rows weigh more. `rewards` is `[rows, rewards]`, the weights are 1 unless given.

    Over rows the mean is 0 without a group of one that keeps its reward, and equal rewards give
    exactly 0; over tokens they give what the mean of the others leaves. Raises ValueError for
    tokens without a mask.

    Others: TRL (`normalize_then_sum`) is over rows with `std_eps=1e-4`, verl over tokens with
    `single="reward"`.
    """
    factors = [1.0] * rewards.shape[-1] if weights is None else weights
    total = torch.zeros_like(group, dtype=torch.float64)
    for column, factor in zip(rewards.double().unbind(-1), factors, strict=True):
        one = grpo(column, group, std_eps=std_eps, scale=scale, single=single)
        total = total + factor * one
    if whiten and over == "tokens":
        if mask is None:
            raise ValueError("over='tokens' needs the mask")
        total = whiten_rows(total, mask.sum(-1))
    elif whiten:
        total = _standardised(total, single, std_eps)
    return total.to(statistics_dtype(rewards))


@torch.no_grad()
def reinforce_pp_baseline(
    reward: Tensor,
    group: Tensor,
    mask: Tensor,
    *,
    single: Single = "zero",
    whiten: bool = True,
    over: Over = "tokens",
) -> Tensor:
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025, arXiv:2501.03262).

    `A = whiten(R - mean_g)`, `(x - mean) / sqrt(var + 1e-8)` over all unmasked tokens of `mask`
    `[rows, tokens]`: the advantage of a row depends on the lengths of the others. With
    `over="rows"` every row that has a token counts once. A row without one gets 0.

    Equal rewards give what the mean of the others leaves, 0 over rows. A group of one has 0
    before it is whitened, or with `single="reward"` its reward.

    Others: verl and OpenRLHF whiten over tokens; verl has `single="reward"`.
    """
    centred = GroupStatistics(reward, group).centred(single)
    if whiten:
        tokens = mask.sum(-1)
        centred = whiten_rows(centred, tokens if over == "tokens" else tokens.clamp(max=1))
    return select(centred, mask.any(-1)).to(statistics_dtype(reward))


def _stretch(stats: GroupStatistics) -> Tensor:
    """What makes a reward minus the mean one minus the mean of the others: n / (n - 1)."""
    return stats.size / (stats.size - 1).clamp(min=1)


def _standardised(x: Tensor, single: Single, std_eps: float) -> Tensor:
    """`(x - mean) / (std + std_eps)` over rows.

    The values of a group sum to 0 unless a single one keeps its reward, so no mean is taken
    off otherwise: what is exactly 0 stays so.
    """
    stats = one_group(x)
    centred = stats.centred() if single == "reward" else x
    return centred / (stats.deviation() + std_eps)
