"""Paging with a known, cyclic future: which parts stay in memory between two uses.

A part that stays through the gap between two of its uses takes room from everything that
runs in between; one that leaves is copied out and back. Pages of one size on one memory are
solved exactly by the greedy method of Adamy, Ambuehl, Anand and Erlebach 2007 ("Call control
in rings"). Unequal ones are NP-hard: farthest next use (Belady 1966), least recent use and
least bytes give starts, and a branch and bound of bounded effort improves on the best of
them, or proves it. This file knows gaps and rooms; neither plans nor devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlflow.scheduler.memory.eviction_search import EvictionSearch
from rlflow.scheduler.memory.intervals import Gap, Trace

EFFORT = 20_000
SWAPS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """The gaps through which parts stay; whether it is `proven` that no choice moves less."""

    stay: frozenset[int]
    proven: bool


def choose_residents(trace: Trace, effort: int = EFFORT) -> Residents:
    """The gaps through which parts stay, so that the bytes moved are few.

    Never more than demand-driven LRU moves; the fewest where sizes are equal on one memory,
    and where the search ends before its `effort` is spent.
    """
    stay: set[int] = set(range(len(trace.gaps)))
    proven = True
    for component in _components(trace):
        stay.difference_update(component)
        found = _choose_component(_part_of(trace, component), effort)
        stay.update(component[number] for number in found.stay)
        proven = proven and found.proven
    return Residents(stay=frozenset(stay), proven=proven)


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


def _choose_component(trace: Trace, effort: int) -> Residents:
    costly = [number for number, gap in enumerate(trace.gaps) if gap.cost]
    kinds = {(trace.gaps[n].size, trace.gaps[n].cost) for n in costly}
    rings = {ring for n in costly for ring, _ in trace.gaps[n].rows}
    if len(kinds) <= 1 and len(rings) <= 1:
        most = _equal(_part_of(trace, costly)) if costly else ()
        stay = frozenset(costly[number] for number in most)
        return Residents(stay=trace.filled(stay), proven=True)
    starts = [lru(trace), farthest(trace), trace.filled(frozenset())]
    by_rows = sorted(range(len(trace.gaps)), key=lambda n: (len(trace.gaps[n].rows), n))
    starts.append(trace.filled(frozenset(), by_rows))
    sound = [trace.filled(stay) for stay in starts if trace.fits(stay)]
    best = min((_swapped(trace, stay) for stay in sound), key=trace.moved)
    search = EvictionSearch(trace, best, effort)
    return Residents(stay=trace.filled(search.best), proven=search.left > 0)


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
