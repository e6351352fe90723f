"""Numbers of a part's values, in the form that parts are joined in.

Sums are in float64. This file knows neither what the values are nor how parts are joined.
"""

from __future__ import annotations

from torch import Tensor

from rlflow.contract.values import Stat


def mean_of(values: Tensor) -> Stat:
    """The mean of all values of a tensor, summed in float64."""
    return Stat(kind="mean", total=values.double().sum().item(), count=float(values.numel()))


def std_of(values: Tensor) -> Stat:
    """The standard deviation of all values of a tensor over n, in float64."""
    wide = values.double()
    if not wide.numel():
        return Stat(kind="std", total=0.0, count=0.0)
    spread = wide.var(correction=0).item()
    return Stat(kind="std", total=wide.sum().item(), count=float(wide.numel()), spread=spread)


def max_of(values: Tensor) -> Stat:
    """The largest value of a tensor."""
    if not values.numel():
        return Stat(kind="max", total=0.0, count=0.0)
    return Stat(kind="max", total=values.double().max().item())


def min_of(values: Tensor) -> Stat:
    """The smallest value of a tensor."""
    if not values.numel():
        return Stat(kind="min", total=0.0, count=0.0)
    return Stat(kind="min", total=values.double().min().item())
