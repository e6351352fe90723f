"""Advantage estimators: rewards (and values) in, advantages out.

Token tensors are padded `[rows, tokens]` with a bool mask, row tensors are `[rows]`, a row
is one response. Nothing here carries a gradient. Statistics run in float64; results are
float32, or float64 if the rewards are. Rewards are taken to be finite: the reward op sees
to that. Rows, groups and padding may come in any order.

This file knows neither models nor how a reward came about.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.ops.math.masked import masked_whiten, select, statistics_dtype


@torch.no_grad()
def token_rewards(
    reward: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Spread an outcome reward over tokens: `[rows]` to `[rows, tokens]`.

    The reward sits on the last unmasked token of its row; a row without one has no place
    for it and gets none. Every unmasked token pays `kl_coef * kl`, with `kl` `[rows, tokens]`
    a divergence estimate under the old policy (Ouyang et al. 2022, eq. 2).
    """
    still_to_come = mask.flip(-1).cumsum(-1).flip(-1)
    wide = reward.to(statistics_dtype(reward)).unsqueeze(-1)
    spread = select(wide, mask & (still_to_come == 1))
    return spread if kl is None else spread - kl_coef * select(kl, mask)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    With `delta_t = r_t + gamma V_{t+1} - V_t`: `A_t = delta_t + gamma lam A_{t+1}`, and 0
    after the last token (no bootstrap at truncation). Masked tokens are skipped as if they
    did not exist, discounting included: t + 1 is the next *unmasked* token, and a reward on
    a masked token is not seen.

    `rewards`, `values` `[rows, tokens]`. Returns `(advantages, returns)`, both
    `[rows, tokens]` and 0 where masked; `returns` is `A + V` before whitening, and `whiten`
    then whitens the advantages over all unmasked tokens (`masked_whiten`).
    """
    order = torch.argsort(mask.logical_not(), dim=-1, stable=True)
    reward = select(rewards.double(), mask).gather(-1, order)
    value = select(values.double(), mask).gather(-1, order)
    following = torch.nn.functional.pad(value[:, 1:], (0, 1)) if value.numel() else value
    packed = _discounted(reward + gamma * following - value, gamma * lam)
    advantages = torch.zeros_like(packed).scatter(-1, order, packed)
    returns = select(advantages + select(values, mask), mask)
    return _finish(advantages, returns, mask, statistics_dtype(rewards), whiten)


@torch.no_grad()
def reinforce_pp(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): the whitened discounted reward-to-go.

    `G_t = r_t + gamma G_{t+1}` over the unmasked tokens of a row, masked ones skipped as in
    `gae`. `rewards` `[rows, tokens]`. Returns `(advantages, returns)`, both
    `[rows, tokens]` and 0 where masked; `returns` is `G`, `whiten` whitens the advantages
    over all unmasked tokens, so a row's advantage depends on the lengths of the others.
    """
    order = torch.argsort(mask.logical_not(), dim=-1, stable=True)
    packed = _discounted(select(rewards.double(), mask).gather(-1, order), gamma)
    returns = select(torch.zeros_like(packed).scatter(-1, order, packed), mask)
    return _finish(returns, returns, mask, statistics_dtype(rewards), whiten)


@torch.no_grad()
def grpo(
    reward: Tensor,
    group: Tensor,
    *,
    std_eps: float = 1e-6,
    scale: Literal["group", "batch", "none"] = "group",
    single: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    `A = (R - mean_g) / (std_g + std_eps)`, standard deviations over n - 1. `scale="batch"`
    divides by the deviation of all rewards instead, `scale="none"` by nothing (Dr.GRPO,
    Liu et al. 2025, arXiv:2503.20783, section 3.2).

    `reward` `[rows]`, `group` int64 `[rows]`: rows of one group share an id, wherever they
    stand. Returns `[rows]`. A group whose rewards are all equal (max = min, never std = 0)
    gets exactly 0. A group of one has no baseline: 0, or with `single="reward"` its reward
    as if the mean were 0 and the group's deviation 1. A deviation of level rewards counts
    as 1.
    """
    stats = _GroupStatistics(reward, group)
    centred = stats.centred(single)
    if scale == "group":
        centred = centred / (stats.deviation() + std_eps)
    elif scale == "batch":
        everything = _GroupStatistics(reward, torch.zeros_like(group))
        centred = centred / (everything.deviation() + std_eps)
    return centred.to(statistics_dtype(reward))


@torch.no_grad()
def rloo(reward: Tensor, group: Tensor, *, single: Literal["zero", "reward"] = "zero") -> Tensor:
    """REINFORCE leave-one-out advantages (Ahmadian et al. 2024, arXiv:2402.14740).

    `A = R - mean of the other rewards of the group = n / (n - 1) (R - mean_g)`.
    `reward` `[rows]`, `group` int64 `[rows]` ids; returns `[rows]`. Equal rewards give
    exactly 0; a group of one gives 0, or with `single="reward"` its reward.
    """
    stats = _GroupStatistics(reward, group)
    factor = stats.size / (stats.size - 1).clamp(min=1)
    return (stats.centred(single) * factor).to(statistics_dtype(reward))


class _GroupStatistics:
    """Float64 statistics of the rewards of each group, spread back to the rows."""

    def __init__(self, reward: Tensor, group: Tensor) -> None:
        ids, self._index = torch.unique(group, return_inverse=True)
        self._groups = len(ids)
        self.reward = reward.double()
        self.size = self._per_row(torch.ones_like(self.reward), "sum")
        self.mean = self._per_row(self.reward, "sum") / self.size
        self.level = self._per_row(self.reward, "amax") == self._per_row(self.reward, "amin")

    def _per_row(self, x: Tensor, reduce: str) -> Tensor:
        """Reduce `x` within each group; every row gets its group's result."""
        empty = x.new_zeros(self._groups)
        reduced = empty.scatter_reduce(0, self._index, x, reduce, include_self=False)
        return reduced[self._index]

    def centred(self, single: Literal["zero", "reward"]) -> Tensor:
        """Reward minus group mean; exactly 0 in a level group; groups of one as told."""
        centred = select(self.reward - self.mean, ~self.level)
        return torch.where(self.size == 1, self.reward, centred) if single == "reward" else centred

    def deviation(self) -> Tensor:
        """Standard deviation of each row's group over n - 1; 1 in a level group."""
        squares = self._per_row((self.reward - self.mean).square(), "sum")
        spread = (squares / (self.size - 1).clamp(min=1)).sqrt()
        return torch.where(self.level, 1.0, spread)


def _discounted(x: Tensor, factor: float) -> Tensor:
    """`y_t = x_t + factor y_{t+1}` along the last dimension."""
    columns = list(x.unbind(-1))
    for t in range(len(columns) - 2, -1, -1):
        columns[t] = torch.add(columns[t], columns[t + 1], alpha=factor)
    return torch.stack(columns, -1) if columns else x


def _finish(
    advantages: Tensor, returns: Tensor, mask: Tensor, dtype: torch.dtype, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Whiten or only clear the advantages where masked; cast both to `dtype`."""
    final = masked_whiten(advantages, mask) if whiten else select(advantages, mask)
    return final.to(dtype), returns.to(dtype)
