"""When a part that has to leave leaves, and how early it is back: copies beside the compute.

A part is asleep from the first action that needs its room to the last one that does. What
runs before the first hides the copy out, what runs after the last hides the copy back. The
moves get places in the list so that, carried out in that order, they fit. This file knows
traces and seconds; it writes no action.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.scheduler.memory.intervals import Trace

Row = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepInterval:
    """A gap's sleep: asleep while the actions at `places` run, `places` in cyclic order.

    `before` run beside the copy out, `behind` beside the copy back.
    """

    gap: int
    places: tuple[int, ...]
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


def whole_gap(trace: Trace, gap: int) -> SleepInterval:
    """Asleep through the whole of a gap."""
    places = {trace.rings[ring].places[index] for ring, index in trace.gaps[gap].rows}
    since = trace.gaps[gap].since
    order = sorted(places, key=lambda place: (place - since - 1) % trace.length)
    return SleepInterval(gap=gap, places=tuple(order))


def shortened(
    trace: Trace,
    stay: frozenset[int],
    copies: Sequence[float],
    seconds: Sequence[float],
    kept: frozenset[int] = frozenset(),
) -> list[SleepInterval]:
    """The naps of all gaps that do not stay, as short as memory allows.

    `copies` are seconds to copy a gap's part out, and as many to bring it back; `seconds`
    those of every place. Room goes to the side whose copy is least hidden. Where bytes move,
    what costs no time to throw away stays last of all, but for what is `kept`: room is worth
    more to a copy.
    """
    if trace.moved(stay):
        contested = {n for held in trace.tight.values() for n in held}
        stay -= {n for n in contested if not (trace.gaps[n].cost or copies[n])}
        stay |= kept
    naps = {n: whole_gap(trace, n) for n in range(len(trace.gaps)) if n not in stay}
    free = Free(trace, stay)
    waiting: list[tuple[float, int, bool]] = []
    for number in naps:
        for back in (True, False):
            heapq.heappush(waiting, (-copies[number], number, back))
    while waiting:
        hidden, number, back = heapq.heappop(waiting)
        nap = naps[number]
        place = nap.places[-1 if back else 0] if nap.places else None
        if place is None or not free.take(number, place):
            continue
        if back:
            nap = replace(nap, places=nap.places[:-1], behind=(place, *nap.behind))
        else:
            nap = replace(nap, places=nap.places[1:], before=(*nap.before, place))
        naps[number] = nap
        heapq.heappush(waiting, (hidden + seconds[place], number, back))
    return [naps[number] for number in sorted(naps) if naps[number].places]


class Free:
    """Bytes that are left in every row beside what stays."""

    def __init__(self, trace: Trace, stay: frozenset[int]) -> None:
        self._trace = trace
        self._left = {
            (ring, index): room
            for ring, held in enumerate(trace.rings)
            for index, room in enumerate(held.rooms)
        }
        self._rows: dict[int, dict[int, list[Row]]] = {}
        for number, gap in enumerate(trace.gaps):
            if number in stay:
                for row in gap.rows:
                    self._left[row] -= gap.size
            else:
                by_place = self._rows.setdefault(number, {})
                for ring, index in gap.rows:
                    place = trace.rings[ring].places[index]
                    by_place.setdefault(place, []).append((ring, index))

    def fits(self, number: int, place: int) -> bool:
        """Whether a gap's part can be there while the action at a place runs."""
        size = self._trace.gaps[number].size
        return all(self._left[row] >= size for row in self._rows[number][place])

    def take(self, number: int, place: int) -> bool:
        """Let a gap's part be there while the action at a place runs, if it fits."""
        if not self.fits(number, place):
            return False
        for row in self._rows[number][place]:
            self._left[row] -= self._trace.gaps[number].size
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A move in the list: just before the action at place `slot`, after the last at the end."""

    nap: SleepInterval
    wake: bool
    slot: int


def placed(trace: Trace, naps: Sequence[SleepInterval]) -> list[Spot]:
    """Sleeps right after the last use, wakes right after the last action that needs the room.

    In one slot the move that is waited for first goes first. A wake for which a copy out has
    first to make room comes after that. Played until a turn ends as it began.
    """
    lane = Lane(trace, naps)
    slots: dict[int, list[tuple[SleepInterval, bool]]] = {}
    for nap in naps:
        slots.setdefault(trace.gaps[nap.gap].since + 1, []).append((nap, False))
        slots.setdefault(nap.places[-1] + 1, []).append((nap, True))
    pending: list[tuple[SleepInterval, bool]] = []
    found: list[Spot] = []
    for _ in range(3):
        found = []
        for slot in range(trace.length + 1):
            pending += slots.get(slot, [])
            pending.sort(key=lambda move: (_deadline(trace, move, slot), move[1], move[0].gap))
            pending = lane.carried_out(pending, slot, found)
    return found


def said(
    trace: Trace, asleep: Mapping[int, Collection[int]], moves: Iterable[tuple[int, bool, int]]
) -> list[Spot]:
    """The moves (gap, whether it wakes, slot) of naps through some places, decided elsewhere."""
    listed = list(moves)
    slots = {(gap, wake): slot for gap, wake, slot in listed}
    naps = {}
    for gap, inside in asleep.items():
        spots = slots[gap, False], slots[gap, True]
        naps[gap] = _nap(trace, gap, inside, spots)
    return [Spot(nap=naps[gap], wake=wake, slot=slot) for gap, wake, slot in listed]


def _nap(trace: Trace, gap: int, inside: Collection[int], slots: tuple[int, int]) -> SleepInterval:
    """Asleep through some places of a gap, with what runs after the slots beside its copies."""
    every = whole_gap(trace, gap).places
    since = trace.gaps[gap].since
    out, back = ((slot - since - 1) % trace.length for slot in slots)
    steps = {place: (place - since - 1) % trace.length for place in every}
    places = [place for place in every if place in inside]
    first, last = steps[places[0]], steps[places[-1]]
    return SleepInterval(
        gap=gap,
        places=tuple(place for place in every if first <= steps[place] <= last),
        before=tuple(place for place in every if out <= steps[place] < first),
        behind=tuple(place for place in every if max(last + 1, back) <= steps[place]),
    )


def waits(trace: Trace, spot: Spot) -> list[tuple[int | None, int | None, int]]:
    """Which place comes after which because of a move, and by how many turns; None is the move."""
    gap, nap = trace.gaps[spot.nap.gap], spot.nap
    ends: dict[int, None] = {}
    for ring in gap.rings:
        here = set(trace.rings[ring].places)
        places = [place for place in nap.places if place in here]
        ends |= dict.fromkeys(places[-1:] if spot.wake else places[:1])
    if spot.wake:
        found: list[tuple[int | None, int | None, int]] = [
            (place, None, int(place >= spot.slot)) for place in ends
        ]
        return [*found, (None, gap.until, int(gap.until < spot.slot))]
    since = (gap.since, None, int(gap.since >= spot.slot))
    return [since, *((None, place, int(place < spot.slot)) for place in ends)]


def _deadline(trace: Trace, move: tuple[SleepInterval, bool], slot: int) -> int:
    """How many places after `slot` the first action is that waits for a move."""
    nap, wake = move
    place = trace.gaps[nap.gap].until if wake else nap.places[0]
    return (place - slot) % trace.length


class Lane:
    """Which gaps' parts are on their memories as the moves of a list are carried out."""

    def __init__(self, trace: Trace, naps: Sequence[SleepInterval]) -> None:
        self._trace = trace
        self._away: set[int] = set()
        self._left = [ring.spare for ring in trace.rings]
        for nap in naps:
            if nap.places[-1] <= trace.gaps[nap.gap].since:
                self._move(nap.gap, wake=False)

    def carried_out(
        self, pending: list[tuple[SleepInterval, bool]], slot: int, found: list[Spot]
    ) -> list[tuple[SleepInterval, bool]]:
        """Carry out what can be, in order, into `found`; returns the wakes that have to wait."""
        left = list(pending)
        while True:
            able = (move for move in left if not move[1] or self._fits(move[0].gap))
            move = next(able, None)
            if move is None:
                return left
            left.remove(move)
            self._move(move[0].gap, wake=move[1])
            found.append(Spot(nap=move[0], wake=move[1], slot=slot))

    def _fits(self, number: int) -> bool:
        gap = self._trace.gaps[number]
        away = number in self._away
        return not away or all(self._left[ring] >= gap.size for ring in gap.rings)

    def _move(self, number: int, *, wake: bool) -> None:
        if (number in self._away) is not wake:
            return
        (self._away.discard if wake else self._away.add)(number)
        gap = self._trace.gaps[number]
        for ring in gap.rings:
            self._left[ring] += -gap.size if wake else gap.size
