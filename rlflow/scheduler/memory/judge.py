"""How good an order is with its sleeps and wakes: its period, and the bytes that it moves.

What `residency`, `chain` and `timing` would make of an order, on numbers alone: what leaves, when
it does, and the slowest cycle of actions, copies and queues. The work is counted, and bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rlflow.scheduler.memory.demand import Demand
from rlflow.scheduler.memory.eviction import Residents, choose_residents
from rlflow.scheduler.memory.intervals import Trace
from rlflow.scheduler.memory.prefetch import SleepInterval, Spot, placed, shortened, waits
from rlflow.scheduler.periodic.cycles import Arc, relax, slowest_cycle
from rlflow.scheduler.periodic.problem import Kernel, Problem, arcs_in_order, turn_arcs
from rlflow.scheduler.plan.plan import Mode

BETTER = 1 - 1e-6
AS_LONG = 1 + 1e-9
PAGING = 2_000

Copies = Sequence[dict[tuple[Mode, bool], float]]
Away = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An order and what leaves in it: the seconds of a turn and the bytes that move in it.

    `away` are gaps, each a part and the action before it, through which parts leave whatever
    else would; `stays` are those through which parts stay where memory is short. `crowded` are
    the pairs of actions that follow each other while a part is away for the second or, beside
    it, for the first: the other way around it might stay.
    """

    kernel: Kernel
    away: Away
    period: float
    moved: int
    stays: tuple[tuple[int, int], ...] = ()
    crowded: tuple[tuple[int, int], ...] = ()

    def better_than(self, other: Judged) -> bool:
        """Whether a turn is shorter, or as long with fewer bytes moved."""
        if self.period < other.period * BETTER:
            return True
        return self.period <= other.period * AS_LONG and self.moved < other.moved


def chosen_residents(trace: Trace, away: Collection[int], effort: int) -> Residents:
    """What stays so that few bytes move, where some gaps are those through which parts leave.

    Of these, too, what fits in the end stays. What is proven is so beside them.
    """
    if not away:
        return choose_residents(trace, effort)
    others = [number for number in range(len(trace.gaps)) if number not in away]
    found = choose_residents(replace(trace, gaps=tuple(trace.gaps[n] for n in others)), effort)
    stay = frozenset(others[number] for number in found.stay)
    return Residents(stay=trace.filled(stay), proven=found.proven)


class Judge:
    """Judges orders of one problem; `left` is the work that it still may spend, in actions."""

    def __init__(self, problem: Problem, demand: Demand, copies: Copies, effort: int) -> None:
        self.problem = problem
        self.demand = demand
        self.copies = copies
        self.left = effort
        self._known: set[tuple[Kernel, Away]] = set()

    def better(self, kernel: Kernel, away: Away, than: Judged) -> Judged | None:
        """The order with what leaves, where it is better than another and not known yet."""
        if (kernel, away) in self._known:
            return None
        self.left -= len(kernel.order) // 8 + 1
        arcs = turn_arcs(self.problem, kernel)
        if relax(self.problem.seconds, arcs, than.period * AS_LONG)[1]:
            return None
        shorter = not relax(self.problem.seconds, arcs, than.period * BETTER)[1]
        found = self._judged(kernel, away, arcs, None if shorter else than.moved)
        return found if found is not None and found.better_than(than) else None

    def judged(self, kernel: Kernel, away: Away) -> Judged:
        """The order with what leaves, judged."""
        found = self._judged(kernel, away, turn_arcs(self.problem, kernel), None)
        assert found is not None
        return found

    def _judged(
        self, kernel: Kernel, away: Away, arcs: Sequence[Arc], fewer: int | None
    ) -> Judged | None:
        """The same; None where bytes move that are not `fewer`."""
        self._known.add((kernel, away))
        self.left -= len(kernel.order)
        trace, owners, modes = self.demand.trace(kernel.order)
        gaps = [
            (owner, kernel.order[gap.since]) for owner, gap in zip(owners, trace.gaps, strict=True)
        ]
        choice = chosen_residents(trace, {n for n, gap in enumerate(gaps) if gap in away}, PAGING)
        moved = trace.moved(choice.stay)
        if fewer is not None and moved >= fewer:
            return None
        copies = [self.copies[o][mode, True] for o, mode in zip(owners, modes, strict=True)]
        seconds = [self.problem.seconds[task] for task in kernel.order]
        naps = shortened(trace, choice.stay, copies, seconds)
        moves = []
        for spot in placed(trace, naps):
            number = spot.nap.gap
            moves.append((spot, self.copies[owners[number]][modes[number], spot.wake]))
        tight = {number for held in trace.tight.values() for number in held}
        return Judged(
            kernel=kernel,
            away=away,
            period=_period(kernel, seconds, arcs, trace, moves),
            moved=moved,
            stays=tuple(gaps[n] for n in sorted(tight & choice.stay) if trace.gaps[n].cost),
            crowded=_crowded(kernel, trace, naps),
        )


def _period(
    kernel: Kernel,
    seconds: Sequence[float],
    arcs: Sequence[Arc],
    trace: Trace,
    moves: Sequence[tuple[Spot, float]],
) -> float:
    """The slowest cycle of an order with its moves; tasks are places, moves come after them."""
    count = len(seconds)
    place = [0] * count
    for position, task in enumerate(kernel.order):
        place[task] = position
    found = [(place[s], place[t], turns) for s, t, turns in arcs]
    lanes: dict[int, list[int]] = {}
    for number, (spot, _) in enumerate(moves, start=count):
        for source, target, turns in waits(trace, spot):
            before = number if source is None else source
            found.append((before, number if target is None else target, turns))
        for ring in trace.gaps[spot.nap.gap].rings:
            lanes.setdefault(ring, []).append(number)
    for line in lanes.values():
        found += [(one, other, 0) for one, other in pairwise(line)]
        found.append((line[-1], line[0], 1))
    spots = [(spot.slot, 0, number) for number, (spot, _) in enumerate(moves, start=count)]
    order = [n for _, _, n in sorted([*spots, *((at, 1, at) for at in range(count))])]
    every = [*seconds, *(copy for _, copy in moves)]
    return slowest_cycle(every, arcs_in_order(list(dict.fromkeys(found)), order)).ratio


def _crowded(
    kernel: Kernel, trace: Trace, naps: Sequence[SleepInterval]
) -> tuple[tuple[int, int], ...]:
    """The use before each costly nap with all that runs in it, and these with the use after."""
    pairs: dict[tuple[int, int], None] = {}
    for nap in naps:
        gap = trace.gaps[nap.gap]
        for place in nap.places if gap.cost else ():
            pairs[kernel.order[gap.since], kernel.order[place]] = None
            pairs[kernel.order[place], kernel.order[gap.until]] = None
    return tuple(pairs)
