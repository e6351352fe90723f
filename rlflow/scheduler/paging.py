"""Paging with a known, cyclic future: which parts stay in memory between two uses.

A part that stays through the gap between two of its uses takes room from everything that
runs in between; one that leaves is copied out and back. Pages of one size on one memory are
solved exactly by the greedy method of Adamy, Ambuehl, Anand and Erlebach 2007 ("Call control
in rings"). Unequal ones are NP-hard: farthest next use (Belady 1966), least recent use and
least bytes give starts, and a branch and bound of a fixed number of nodes improves on the
best of them, or proves it. This file knows gaps and rooms; neither plans nor devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

EFFORT = 20_000
SWAPS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A memory and the actions that use it, in cyclic order.

    `rooms` are the bytes that each action leaves to what it does not need; `places` are the
    actions' places in the list. `spare` is what all parts together leave free while no action
    runs, below 0 where they do not fit.
    """

    rooms: tuple[int, ...]
    places: tuple[int, ...]
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What lies between two uses of a part, at places `since` and `until` of the list.

    Staying takes `size` bytes on each of `rings` in every row (ring, index) of `rows`, which
    follow each other; leaving moves `cost` bytes out and back, 0 for what is thrown away.
    """

    size: int
    cost: int
    since: int
    until: int
    rings: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]

    def covers(self, place: int, length: int) -> bool:
        """Whether a place of a list of that length lies between the two uses."""
        reach = (self.until - self.since) % length or length
        return 0 < (place - self.since) % length < reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The gaps through which parts stay; whether it is `proven` that no choice moves less."""

    stay: frozenset[int]
    proven: bool


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A cyclic trace of `length` actions: the memories, and the gaps that compete for room."""

    length: int
    rings: tuple[Ring, ...]
    gaps: tuple[Gap, ...]

    @cached_property
    def tight(self) -> dict[tuple[int, int], list[int]]:
        """The gaps of every row in which not all of them can stay."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, gap in enumerate(self.gaps):
            for row in gap.rows if gap.size else ():
                found.setdefault(row, []).append(number)
        return {row: held for row, held in found.items() if self.excess(row, held) > 0}

    def room(self, row: tuple[int, int]) -> int:
        """The bytes of a row."""
        return self.rings[row[0]].rooms[row[1]]

    def excess(self, row: tuple[int, int], held: Iterable[int]) -> int:
        """By how many bytes some gaps overflow a row; below 0 what they leave free."""
        return sum(self.gaps[number].size for number in held) - self.room(row)

    def fits(self, stay: frozenset[int]) -> bool:
        """Whether all of `stay` can stay."""
        tight = self.tight.items()
        return all(self.excess(row, stay.intersection(held)) <= 0 for row, held in tight)

    def moved(self, stay: frozenset[int]) -> int:
        """The bytes that move in one turn where only `stay` stays."""
        return sum(gap.cost for number, gap in enumerate(self.gaps) if number not in stay)

    def filled(self, stay: frozenset[int], order: Iterable[int] | None = None) -> frozenset[int]:
        """`stay`, and all that fits beside it: what costs most first, then shorter gaps."""
        free = {row: -self.excess(row, stay.intersection(held)) for row, held in self.tight.items()}
        rows = self._tight_rows
        chosen = set(stay)
        for number in order or sorted(set(range(len(self.gaps))) - stay, key=self._worth):
            size = self.gaps[number].size
            if all(free[row] >= size for row in rows[number]):
                chosen.add(number)
                for row in rows[number]:
                    free[row] -= size
        return frozenset(chosen)

    def _worth(self, number: int) -> tuple[int, int, int]:
        gap = self.gaps[number]
        return -gap.cost, len(gap.rows), number

    @cached_property
    def _tight_rows(self) -> list[list[tuple[int, int]]]:
        rows: list[list[tuple[int, int]]] = [[] for _ in self.gaps]
        for row, held in self.tight.items():
            for number in held:
                rows[number].append(row)
        return rows


def choose(trace: Trace, effort: int = EFFORT) -> Choice:
    """The gaps through which parts stay, so that the bytes moved are few.

    Never more than demand-driven LRU moves; the fewest where sizes are equal on one memory,
    and where the search ends before its `effort` are spent.
    """
    stay: set[int] = set(range(len(trace.gaps)))
    proven = True
    for component in _components(trace):
        stay.difference_update(component)
        found = _choose_component(_part_of(trace, component), effort)
        stay.update(component[number] for number in found.stay)
        proven = proven and found.proven
    return Choice(stay=frozenset(stay), proven=proven)


def _components(trace: Trace) -> list[list[int]]:
    """The gaps that meet in tight rows, directly or through others."""
    leader: dict[int, int] = {}

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    for held in trace.tight.values():
        for number in held:
            leader.setdefault(number, number)
            leader[find(number)] = find(held[0])
    groups: dict[int, list[int]] = {}
    for number in sorted(leader):
        groups.setdefault(find(number), []).append(number)
    return list(groups.values())


def _part_of(trace: Trace, component: list[int]) -> Trace:
    gaps = tuple(trace.gaps[number] for number in component)
    return Trace(length=trace.length, rings=trace.rings, gaps=gaps)


def _choose_component(trace: Trace, effort: int) -> Choice:
    costly = [number for number, gap in enumerate(trace.gaps) if gap.cost]
    kinds = {(trace.gaps[n].size, trace.gaps[n].cost) for n in costly}
    rings = {ring for n in costly for ring, _ in trace.gaps[n].rows}
    if len(kinds) <= 1 and len(rings) <= 1:
        most = _equal(_part_of(trace, costly)) if costly else ()
        stay = frozenset(costly[number] for number in most)
        return Choice(stay=trace.filled(stay), proven=True)
    starts = [lru(trace), farthest(trace), trace.filled(frozenset())]
    by_rows = sorted(range(len(trace.gaps)), key=lambda n: (len(trace.gaps[n].rows), n))
    starts.append(trace.filled(frozenset(), by_rows))
    sound = [trace.filled(stay) for stay in starts if trace.fits(stay)]
    best = min((_swapped(trace, stay) for stay in sound), key=trace.moved)
    search = Search(trace, best, effort)
    return Choice(stay=trace.filled(search.best), proven=search.left > 0)


def _swapped(trace: Trace, stay: frozenset[int]) -> frozenset[int]:
    """Improved by letting one leave for others that cost more, as long as that helps."""
    tries = SWAPS // (1 + sum(len(held) for held in trace.tight.values()))
    better = True
    while better:
        better = False
        for number in sorted(stay, key=lambda n: (trace.gaps[n].cost, n)):
            tries -= 1
            if tries < 0:
                return stay
            others = set(range(len(trace.gaps))) - stay
            order = sorted(others, key=lambda n: (-trace.gaps[n].cost, n))
            found = trace.filled(stay - {number}, [*order, number])
            if trace.moved(found) < trace.moved(stay):
                stay, better = found, True
                break
    return stay


def lru(trace: Trace) -> frozenset[int]:
    """The gaps through which parts stay where the least recently used one leaves on demand."""
    return _demand(trace, lambda gap, place: (place - gap.since) % trace.length or trace.length)


def farthest(trace: Trace) -> frozenset[int]:
    """The same where what moves nothing leaves first, then the one with the farthest next use."""
    ahead = trace.length

    def key(gap: Gap, place: int) -> int:
        return (gap.cost == 0) * ahead * 2 + ((gap.until - place) % ahead or ahead)

    return _demand(trace, key)


def _demand(trace: Trace, key: Callable[[Gap, int], int]) -> frozenset[int]:
    """Played turn by turn until steady: who leaves, where there is no room, is largest by `key`."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for row in trace.tight:
        rows.setdefault(trace.rings[row[0]].places[row[1]], []).append(row)
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, gap in enumerate(trace.gaps):
        starts.setdefault(gap.since, []).append(number)
        ends.setdefault(gap.until, []).append(number)
    gone: set[int] = set()
    stayed: frozenset[int] = frozenset()
    for _ in range(3):
        steady: set[int] = set()
        for place in sorted({*rows, *starts, *ends}):
            steady.update(n for n in ends.get(place, ()) if n not in gone)
            for row in sorted(rows.get(place, ())):
                here = [n for n in trace.tight[row] if n not in gone]
                here.sort(key=lambda n: (key(trace.gaps[n], place), n))
                over = trace.excess(row, here)
                while over > 0:
                    victim = here.pop()
                    gone.add(victim)
                    over -= trace.gaps[victim].size
            gone.difference_update(starts.get(place, ()))
        stayed = frozenset(steady)
    return stayed


def _equal(trace: Trace) -> frozenset[int]:
    """The most gaps that can stay where all are of one size on one ring."""
    (ring,) = {ring for gap in trace.gaps for ring, _ in gap.rows}
    size = trace.gaps[0].size
    rooms = [room // size for room in trace.rings[ring].rooms]
    spans = []
    for number, gap in enumerate(trace.gaps):
        start = gap.rows[0][1]
        spans.append((start + len(gap.rows), start, number))
    spans.sort(key=lambda span: (span[0], -span[1], span[2]))
    least, most = 0, len(spans)
    best: frozenset[int] = frozenset()
    while least < most:
        count = (least + most + 1) // 2
        found = _settled(spans, rooms, count)
        if found is None:
            most = count - 1
        else:
            least, best = count, found
    return best


def _settled(
    spans: list[tuple[int, int, int]], rooms: list[int], count: int
) -> frozenset[int] | None:
    """A choice of `count` gaps (stop, start, number) for every turn; None if there is none.

    The list is cut where a turn begins. Each turn takes the gaps that stop first among those
    that fit beside what reaches over from the turn before. What it takes is never behind a
    choice that is the same every turn, and never before what the turn before took: so it
    settles on such a choice, or runs out of gaps.
    """
    length = len(rooms)
    over = [0] * length
    last: list[int] = []
    while True:
        taken: list[int] = []
        held = over + [0] * length
        for stop, start, number in spans:
            if all(held[place] < rooms[place % length] for place in range(start, stop)):
                taken.append(number)
                for place in range(start, stop):
                    held[place] += 1
                if len(taken) == count:
                    break
        if len(taken) < count:
            return None
        if taken == last:
            return frozenset(taken)
        last, over = taken, held[length:]


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


class Search:
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
        needs: dict[int, int] = {}
        for row, held in trace.tight.items():
            members = [n for n in held if n in self.sizes]
            mask = sum(1 << n for n in members)
            needs[mask] = max(needs.get(mask, 0), trace.excess(row, members))
        self._visit([self._ask(need, mask) for mask, need in needs.items() if need > 0], (), 0)

    def _ask(self, need: int, mask: int) -> Ask:
        members = list(_members(mask))
        best = min(members, key=lambda n: Fraction(self.costs[n], self.sizes[n]))
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

        def worth(number: int) -> tuple[float, int, int]:
            size, bit = self.sizes[number], 1 << number
            serves = sum(min(other.need, size) for other in rows if other.mask & bit)
            return min(size, row.need) / self.costs[number], serves, -number

        return max(_members(row.mask), key=worth)


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
