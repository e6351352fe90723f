"""The period of a plan as a range: what it comes to in many worlds that are as likely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodRange:
    """Seconds of a period in each world, by the number of the world; `shares` of what they vary by.

    A world draws the lengths, the efficiencies and the imbalance that a plan does not know. World n
    is the same for every plan, so that two plans are compared within it.
    """

    periods: tuple[float, ...]
    shares: tuple[tuple[str, float], ...] = ()

    @property
    def median(self) -> float:
        """The period that half of the worlds stay within."""
        return median(self.periods)

    @property
    def low(self) -> float:
        """The period of which 5 % of the worlds are shorter."""
        return quantile(self.periods, LOW)

    @property
    def high(self) -> float:
        """The period of which 5 % of the worlds are longer."""
        return quantile(self.periods, HIGH)

    def as_json(self) -> dict[str, Any]:
        """The range as plain data, in seconds."""
        figures = {"median": self.median, "low": self.low, "high": self.high}
        return {**figures, "share": 0.9, "worlds": len(self.periods), "from": dict(self.shares)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """How many times as fast one plan is as another: in the middle, and in 90 % of the worlds.

    `wins` is the share of worlds in which it is faster at all.
    """

    times: float
    low: float
    high: float
    wins: float

    @property
    def told(self) -> bool:
        """Whether the difference is larger than what is uncertain: one side of 1 in 90 %."""
        return self.low > 1 or self.high < 1

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {**asdict(self), "larger_than_uncertain": self.told}


def contest(first: PeriodRange, second: PeriodRange) -> Contest:
    """How many times as fast the first is as the second, world by world."""
    pairs = list(zip(first.periods, second.periods, strict=True))
    times = [other / own for own, other in pairs]
    return Contest(
        times=median(times),
        low=quantile(times, LOW),
        high=quantile(times, HIGH),
        wins=sum(ratio > 1 for ratio in times) / len(times),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share of them do not exceed, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
