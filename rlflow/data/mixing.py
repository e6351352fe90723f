"""Several data sources as one, mixed by weight; which row comes where is a pure function.

This file knows neither files nor what scores a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from math import isfinite, lcm
from typing import Any

from rlflow.data.checks import summarised
from rlflow.data.paths import declared_here
from rlflow.data.pictures.columns import IMAGES
from rlflow.data.sources import ROW_ID, Computed, DataSource, Row, row_at
from rlflow.errors import Finding, Source, UsageError, known_names, near_names

COLUMN = "data_source"


def mix(
    sources: Mapping[str, DataSource],
    weights: Mapping[str, float] | None = None,
    *,
    column: str = COLUMN,
    fill: str | None = None,
) -> Mix:
    """Rows of several sources, `{name: source}`, in the proportion of their weights.

    Every source has the weight 1 unless `weights` gives one for each. The sources take
    turns, so that any stretch of rows holds them in proportion, and each goes through its
    own epochs. `column` is added to every row and holds the name of its source. A column
    that some sources lack is an error, or the text `fill` in their rows. Raises `UsageError`
    (E282) for names and weights that cannot be right.
    """
    where = declared_here()
    given = dict.fromkeys(sources, 1.0) if weights is None else dict(weights)
    if not sources:
        raise _bad("a mix of no sources", where, expected="{name: source}")
    others: dict[str, Any] = {n: s for n, s in sources.items() if not isinstance(s, DataSource)}
    for name, other in others.items():
        got = f"{type(other).__name__} {other!r:.60}"
        raise _bad(f"{name!r} in a mix is no data source", where, got=got)
    for name in [*given, *sources]:
        if name not in sources or name not in given:
            raise _bad(
                f"a mix has a weight without a source, {name!r}"
                if name in given
                else f"a mix has no weight for {name!r}",
                where,
                got=f"sources {known_names(tuple(sources))}",
                near=near_names(name, sources if name in given else given),
            )
    for name, weight in given.items():
        if not (isinstance(weight, int | float) and isfinite(weight) and weight > 0):
            raise _bad(f"weight {weight} of {name!r} in a mix", where, expected="above 0")
    exact = [Fraction(str(given[name])) for name in sources]
    whole = lcm(*(weight.denominator for weight in exact))
    return Mix(
        names=tuple(sources),
        sources=tuple(sources.values()),
        weights=tuple(int(weight * whole) for weight in exact),
        column=column,
        fill=fill,
        declared=where,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(DataSource):
    """A data source of several sources by name, drawn in proportion to whole-number weights."""

    names: tuple[str, ...]
    sources: tuple[DataSource, ...]
    weights: tuple[int, ...]
    column: str = COLUMN
    fill: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of all sources, and the one that names the source; `UsageError` (E283)."""
        findings = self._differences()
        if findings:
            raise UsageError(*findings)
        return (*self._union(), self.column)

    @property
    def pictured(self) -> bool:
        """Whether any source has pictures; rows of the others have none."""
        return any(source.pictured for source in self.sources)

    @property
    def remote(self) -> bool:
        """Whether any source may need the network."""
        return any(source.remote for source in self.sources)

    def size(self) -> int | None:
        """The number of rows of all sources, None where one does not know."""
        total = 0
        for source in self.sources:
            size = source.size()
            if size is None:
                return None
            total += size
        return total

    def load(self) -> Sequence[Row]:
        """The rows of the sources, one source after the other."""
        starts = self._starts()

        def row(index: int) -> Row:
            which = bisect_right(starts, index) - 1
            return self._row(which, self.sources[which].rows()[index - starts[which]])

        return Computed(starts[-1], row)

    def batch(self, iteration: int, size: int, seed: int) -> list[Row]:
        """The `size` rows of an iteration (from 0); `row_id` counts through `rows()`."""
        starts = self._starts()
        seeds = [_seed(seed, name) for name in self.names]
        first = iteration * size
        drawn = rows_by_source(self.weights, first)
        found = []
        for position in range(first, first + size):
            after = rows_by_source(self.weights, position + 1)
            which = next(k for k, (a, b) in enumerate(zip(drawn, after, strict=True)) if a != b)
            rows = self.sources[which].rows()
            index = row_at(drawn[which], len(rows), seeds[which])
            found.append({**self._row(which, rows[index]), ROW_ID: starts[which] + index})
            drawn = after
        return found

    def _in_buckets(self, column: str) -> Mapping[str, Sequence[int]]:
        """By the column that names the sources no row is read."""
        if column != self.column:
            return super(Mix, self)._in_buckets(column)
        starts = self._starts()
        return {
            name: range(first, end)
            for name, first, end in zip(self.names, starts, starts[1:], strict=False)
        }

    def describe(self) -> str:
        """The sources with their weights."""
        parts = zip(self.weights, self.names, self.sources, strict=True)
        return "mix of " + " + ".join(f"{w} {n} ({s.describe()})" for w, n, s in parts)

    def content(self) -> str:
        """What each source's rows are, by its name; nothing of those that are computed."""
        found = zip(self.names, (source.content() for source in self.sources), strict=True)
        return "; ".join(f"{name}: {content}" for name, content in found if content)

    def check(self) -> list[Finding]:
        """What is wrong with the sources, and with their columns side by side."""
        found = [finding for source in self.sources for finding in source.check()]
        return summarised(found) or self._differences()

    def notes(self) -> list[str]:
        """What the checks of the sources leave out."""
        return [note for source in self.sources for note in source.notes()]

    def _starts(self) -> list[int]:
        """Where each source begins in `rows()`, and where the last one ends."""
        sizes = [len(source.rows()) for source in self.sources]
        return [0, *accumulate(sizes)]

    def _row(self, which: int, row: Row) -> Row:
        filled = {name: row.get(name, self.fill) for name in self._union()}
        if self.pictured:
            filled[IMAGES] = row.get(IMAGES, [])
        return {**filled, self.column: self.names[which]}

    def _union(self) -> tuple[str, ...]:
        made: tuple[str, ...] = self._memo.once("union", self._every_column)
        return made

    def _every_column(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for source in self.sources for name in source.columns))

    def _differences(self) -> list[Finding]:
        """Columns that only some sources have, and sources that have the mix's own column."""
        union = self._union()
        if self.column in union:
            which = next(k for k, s in enumerate(self.sources) if self.column in s.columns)
            finding = Finding(
                code="E283",
                what=f"{self.names[which]!r} has a column {self.column!r}, which the mix adds",
                where=self.declared,
                got=f"columns {known_names(self.sources[which].columns)}",
                expected="any other name for one of the two",
                fix='column="mixed_from"',
            )
            return [finding]
        expected = [column for column in union if not (self.pictured and column == IMAGES)]
        lacking = {
            name: [column for column in expected if column not in source.columns]
            for name, source in zip(self.names, self.sources, strict=True)
        }
        if self.fill is not None or not any(lacking.values()):
            return []
        shown = (f"{name} lacks {', '.join(gone)}" for name, gone in lacking.items() if gone)
        finding = Finding(
            code="E283",
            what="the sources of a mix have different columns",
            where=self.declared,
            got="\n".join(shown),
            expected="the same columns in all, by columns= and rename= of each",
            fix='fill=""',
        )
        return [finding]


def rows_by_source(weights: Sequence[int], position: int) -> list[int]:
    """How many of the first `position` rows come from each source.

    The first source gets its share rounded to the nearest, of what is left the next one, and
    so on: each count grows with the position by 0 or 1, and is never farther from its share
    than half a row for every source before it and itself.
    """
    counts, left, rest = [], position, sum(weights)
    for weight in weights:
        count = (2 * left * weight + rest) // (2 * rest) if rest > weight else left
        counts.append(count)
        left -= count
        rest -= weight
    return counts


def _seed(seed: int, name: str) -> int:
    """A seed for one source, so that equal sources come in orders of their own."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _bad(what: str, where: Source | None, **parts: Any) -> UsageError:
    return UsageError(Finding(code="E282", what=what, where=where, **parts))
