"""Branch and bound over the gaps in which parts leave: exact where its effort is enough.

Rows in which not all gaps fit ask for bytes that have to leave. This file knows traces, and
improves on a choice that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from rlflow.scheduler.memory.intervals import Trace


@dataclass(frozen=True, slots=True)
class Ask:
    """A row that asks for `need` bytes to leave; `mask` is who still may, `left` their bytes.

    Each byte moves `rate` bytes (a ratio) at the least, and whoever leaves `least`.
    """

    need: int
    mask: int
    left: int
    rate: tuple[int, int]
    least: int

    @property
    def moved(self) -> int:
        """The least that this row alone moves."""
        above, below = self.rate
        return max(-(-self.need * above // below), self.least)


class EvictionSearch:
    """Branch and bound over what leaves; `best` is what stays.

    A bound is the sum over rows that share no gap of the least that each moves. `left` is
    the effort not spent, of which each row of a node costs 1.
    """

    def __init__(self, trace: Trace, start: frozenset[int], effort: int) -> None:
        self.trace = trace
        self.best = start
        self.cost = trace.moved(start)
        self.left = effort
        costly = [n for n, gap in enumerate(trace.gaps) if gap.cost]
        self.sizes = {n: trace.gaps[n].size for n in costly}
        self.costs = {n: trace.gaps[n].cost for n in costly}
        cheap = sorted(costly, key=lambda n: Fraction(self.costs[n], self.sizes[n]))
        self.ranks = {n: rank for rank, n in enumerate(cheap)}
        needs: dict[int, int] = {}
        for row, held in trace.tight.items():
            members = [n for n in held if n in self.sizes]
            mask = sum(1 << n for n in members)
            needs[mask] = max(needs.get(mask, 0), trace.excess(row, members))
        self._visit([self._ask(need, mask) for mask, need in needs.items() if need > 0], (), 0)

    def _ask(self, need: int, mask: int) -> Ask:
        members = list(_members(mask))
        best = min(members, key=self.ranks.__getitem__)
        return Ask(
            need,
            mask,
            sum(self.sizes[n] for n in members),
            (self.costs[best], self.sizes[best]),
            min(self.costs[n] for n in members),
        )

    def _visit(self, rows: list[Ask], gone: tuple[int, ...], cost: int) -> None:
        if self.left <= 0:
            return
        self.left -= 1 + len(rows)
        if not rows:
            self._found(gone, cost)
            return
        if cost + _bound(rows) >= self.cost:
            return
        number = self._branch(rows)
        bit, size = 1 << number, self.sizes[number]
        left, kept = [], []
        for row in rows:
            if not row.mask & bit:
                left.append(row)
                kept.append(row)
                continue
            rest, mask = row.left - size, row.mask & ~bit
            if row.need > size:
                left.append(Ask(row.need - size, mask, rest, row.rate, row.least))
            kept.append(Ask(row.need, mask, rest, row.rate, row.least))
        self._visit(left, (*gone, number), cost + self.costs[number])
        if all(row.left >= row.need for row in kept):
            self._visit(kept, gone, cost)

    def _found(self, gone: tuple[int, ...], cost: int) -> None:
        if cost < self.cost:
            free = {n for n, gap in enumerate(self.trace.gaps) if not gap.cost}
            self.best = self.trace.filled(
                frozenset(range(len(self.trace.gaps))) - free - frozenset(gone)
            )
            self.cost = self.trace.moved(self.best)

    def _branch(self, rows: list[Ask]) -> int:
        """Of the row that asks for most: who serves it, and then others, for the fewest bytes."""
        row = max(rows, key=lambda row: (row.need, -row.mask))
        serves = self._served(rows, row.mask)

        def worth(number: int) -> tuple[float, int, int]:
            share = min(self.sizes[number], row.need) / self.costs[number]
            return share, serves[number], -number

        return max(serves, key=worth)

    def _served(self, rows: list[Ask], mask: int) -> dict[int, int]:
        """Of what rows ask for, the bytes that each member of a mask gives them.

        Where a row has most members of a size, those that it lacks are counted instead.
        """
        found = dict.fromkeys(_members(mask), 0)
        sizes: dict[int, int] = {}
        for number in found:
            size = self.sizes[number]
            sizes[size] = sizes.get(size, 0) | 1 << number
        for size, own in sizes.items():
            everywhere = 0
            for row in rows:
                share = min(row.need, size)
                has, lacks = own & row.mask, own & ~row.mask
                inverse = lacks.bit_count() < has.bit_count()
                everywhere += share if inverse else 0
                for number in _members(lacks if inverse else has):
                    found[number] += -share if inverse else share
            for number in _members(own):
                found[number] += everywhere
        return found


def _bound(rows: list[Ask]) -> int:
    """What rows without a gap in common move at the least, all together."""
    taken, bound = 0, 0
    for row in sorted(rows, key=lambda row: (-row.moved, row.mask)):
        if not row.mask & taken:
            taken |= row.mask
            bound += row.moved
    return bound


def _members(mask: int) -> Iterator[int]:
    """The numbers whose bits are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
