"""Statistics of groups of rows: the responses to one prompt, say.

A group is the rows that share an int64 id, wherever they stand; groups may be unequal and
interleaved. Statistics run in float64. A group is degenerate if it has at least two rows and
its largest value equals its smallest: a computed deviation of equal floats need not be 0.

This file knows neither rewards nor advantages.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.ops.math.masked import VARIANCE_EPS, select

Scale = Literal["group", "batch", "none"]
Single = Literal["zero", "reward"]


class GroupStatistics:
    """Statistics of `values` `[rows]` within each group of `group` int64 `[rows]`.

    `size`, `mean` and `level` (largest = smallest) are `[rows]`: every row has its group's. A
    group with a value that is not finite is not level, so that its statistics are NaN.
    """

    def __init__(self, values: Tensor, group: Tensor) -> None:
        ids, self.index = torch.unique(group, return_inverse=True)
        self.count = len(ids)
        self.values = values.double()
        self.size = self.total(torch.ones_like(self.values))
        self.mean = self.total(self.values) / self.size
        self.level = self.largest(self.values) - self._reduced(self.values, "amin") == 0

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` `[rows]` over each row's group, `[rows]`."""
        return self._reduced(x, "sum")

    def largest(self, x: Tensor) -> Tensor:
        """The largest of `x` `[rows]` in each row's group, `[rows]`."""
        return self._reduced(x, "amax")

    def _reduced(self, x: Tensor, reduce: str) -> Tensor:
        empty = x.new_zeros(self.count)
        reduced = empty.scatter_reduce(0, self.index, x, reduce, include_self=False)
        return reduced[self.index]

    def centred(self, single: Single = "zero") -> Tensor:
        """Value minus group mean; exactly 0 in a level group."""
        return self.alone(select(self.values - self.mean, ~self.level), single)

    def alone(self, x: Tensor, single: Single) -> Tensor:
        """`x`, and with `single="reward"` the value itself in a group of one."""
        return torch.where(self.size == 1, self.values, x) if single == "reward" else x

    def deviation(self) -> Tensor:
        """Standard deviation of each row's group over n - 1; 1 in a level group."""
        squares = self.total((self.values - self.mean).square())
        spread = (squares / (self.size - 1).clamp(min=1)).sqrt()
        return torch.where(self.level, 1.0, spread)

    def scaled(self, x: Tensor, scale: Scale, std_eps: float) -> Tensor:
        """`x` over `deviation + std_eps`, of its group, of all values, or as it is."""
        if scale == "none":
            return x
        stats = self if scale == "group" else one_group(self.values)
        return x / (stats.deviation() + std_eps)

    def each(self, x: Tensor) -> Tensor:
        """`x` `[rows]`, the same within a group, as `[groups]` in the order of the ids."""
        return x.new_zeros(self.count).scatter(0, self.index, x)


def one_group(values: Tensor) -> GroupStatistics:
    """The statistics of all values as those of one group."""
    return GroupStatistics(values, torch.zeros_like(values, dtype=torch.int64))


@torch.no_grad()
def degenerate(reward: Tensor, group: Tensor) -> Tensor:
    """Which rows belong to a degenerate group: bool `[rows]`.

    `reward` `[rows]` (or `[rows, rewards]`: all of them must be level), `group` int64 `[rows]`.
    A group of at least two rows whose largest reward equals its smallest teaches nothing to a
    group-relative estimator; DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) samples again
    in its place. A group of one is not degenerate: it has nothing to be compared with. A
    NaN or an infinity is no reward to compare with, so its group is not degenerate either.

    Others: verl's filter asks whether a computed standard deviation is 0 and so keeps three
    rewards of 0.1 each.
    """
    columns = reward.unsqueeze(-1) if reward.dim() == 1 else reward
    found = torch.ones_like(group, dtype=torch.bool)
    for column in columns.unbind(-1):
        stats = GroupStatistics(column, group)
        found &= stats.level & (stats.size > 1)
    return found


def whiten_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over rows that count `weight` times each.

    `x` and `weight` (at least 0) `[rows]`; returns float64 `[rows]`, 0 where the weight is. With
    the rows' token counts as weights it is `masked_whiten` of `x` spread over the tokens. The
    variance is over N - 1, N the sum of the weights. Equal entries give exactly 0.
    """
    counted, weight = weight > 0, weight.double()
    wide = x.double()
    if not x.numel():
        return wide
    total = weight.sum()
    offset = select(wide - select(wide, counted, -torch.inf).amax(), counted)
    centred = select(offset - (weight * offset).sum() / total.clamp(min=1), counted)
    variance = (weight * centred.square()).sum() / (total - 1).clamp(min=1)
    return centred * (variance + VARIANCE_EPS).rsqrt()
