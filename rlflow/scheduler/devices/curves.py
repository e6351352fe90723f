"""What devices were measured to reach, by size: curves that stand for a table's single figures.

`rlflow doctor --measure` times products by rows, width and dtype, attention by the length of rows,
copies and collectives by bytes. A point is a rate; between two of them rates are lines over the
logarithms of both. Knows names of timings; no kinds, no models.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

# Names of timings; a product's dtype and width, and an attention's dtype and heads, stand behind.
ROWS, ATTENTION, GATHER = "product of rows", "attention", "all_gather"
PINNED, PAGEABLE = ("h2d pinned", "d2h pinned"), ("h2d pageable", "d2h pageable")
# Below so many bytes a collective is its latency, which is a figure of a kind.
LEAST_GATHER = 1 << 20


class TimedPoint(Protocol):
    """One timing: `rate` in flop/s or B/s at a `size` in rows, tokens or bytes."""

    @property
    def what(self) -> str:
        """Its name."""

    @property
    def size(self) -> float:
        """Rows, tokens of a row, or bytes."""

    @property
    def rate(self) -> float:
        """Flop/s or B/s."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Rates by size, of sizes in order; what lies outside has the rate of the nearest end."""

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """The rate at a size."""
        sizes = [point for point, _ in self.points]
        place = bisect_left(sizes, size)
        if place == 0 or place == len(sizes):
            return self.points[min(place, len(sizes) - 1)][1]
        (low, slow), (high, fast) = self.points[place - 1 : place + 1]
        part = math.log(size / low) / math.log(high / low)
        return float(slow * (fast / slow) ** part)

    @property
    def most(self) -> float:
        """The largest rate."""
        return max(rate for _, rate in self.points)


@dataclass(frozen=True)
class Curves:
    """All curves of a kind by name; empty where nothing was measured."""

    found: tuple[tuple[str, Curve], ...] = ()

    @cached_property
    def _named(self) -> Mapping[str, Curve]:
        return dict(self.found)

    @cached_property
    def version(self) -> str:
        """A short hash of all points: other measurements are another version."""
        return hashlib.sha256(repr(self.found).encode()).hexdigest()[:8] if self.found else ""

    def filled(self, dtype: str, rows: float, width: float) -> float | None:
        """Of the best product of a dtype, the part that one of so many rows gets.

        Of the measured widths the one that is nearest by its logarithm. None if none was measured.
        """
        widths = {
            int(name.rpartition(" ")[2]): curve
            for name, curve in self.found
            if name.startswith(f"{ROWS} {dtype} ")
        }
        if not widths:
            return None
        near = min(widths, key=lambda known: abs(math.log(known / max(width, 1.0))))
        best = max(curve.most for curve in widths.values())
        return widths[near].at(max(rows, 1.0)) / best

    def attended(self, dtype: str, row: float) -> float | None:
        """Flop/s of causal attention over rows of so many tokens; None if it was not measured."""
        curve = self._named.get(f"{ATTENTION} {dtype}")
        return None if curve is None else curve.at(max(row, 1.0))

    def to_host(self, size: float) -> float | None:
        """B/s of one copy of so many bytes from or to pinned memory, the slower way."""
        if not self.found:  # A search asks very often.
            return None
        found = [self._named[name].at(max(size, 1.0)) for name in PINNED if name in self._named]
        return min(found, default=None)

    def pageable(self, size: float) -> float | None:
        """The same of memory that is not pinned."""
        found = [self._named[name].at(max(size, 1.0)) for name in PAGEABLE if name in self._named]
        return min(found, default=None)

    @property
    def gather(self) -> Curve | None:
        """B/s that each rank receives of an all-gather, by its bytes."""
        return self._named.get(GATHER)


NO_CURVES = Curves()


def curves_of(timings: Iterable[TimedPoint]) -> Curves:
    """The curves through timings: those of which there are two sizes or more."""
    points: dict[str, dict[float, float]] = {}
    for timing in timings:
        points.setdefault(timing.what, {})[float(timing.size)] = timing.rate
    made = {
        name: Curve(tuple(sorted(of.items())))
        for name, of in points.items()
        if len(of) > 1 and min(of) > 0
    }
    assert all(
        low < high for curve in made.values() for (low, _), (high, _) in pairwise(curve.points)
    )
    return Curves(tuple(sorted(made.items())))
