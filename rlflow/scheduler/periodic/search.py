"""Good periodic schedules quickly: lists of several priorities, then moves on the slowest cycle.

List scheduling of one turn (Graham 1969) by several priorities gives kernels. Only a change on
the slowest cycle shortens the period, so the search swaps neighbours there. What that leaves of
the bound is tried by `fit`, where the problem is small. The effort is counted in moves that
follow from the size alone: the same problem gives the same schedule everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlflow.scheduler.periodic.cycles import Arc, relax
from rlflow.scheduler.periodic.fit import FIT_TASKS, WORK, fitted
from rlflow.scheduler.periodic.kernel_moves import rotated, swapped
from rlflow.scheduler.periodic.problem import (
    Kernel,
    Problem,
    Timed,
    arcs_in_order,
    compact,
    kernel_of,
    queue_arcs,
    timed_kernel,
    turn_arcs,
    turn_edges,
)
from rlflow.scheduler.periodic.slots import slotted

AT_BOUND = 1 + 1e-9
BETTER = 1 - 1e-6
HALVINGS = 6
NEAR = 1.005
SLOT_TASKS = 24
MOVES = 40
MOVED_TASKS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A schedule, and a period that no schedule is proven to go below."""

    timed: Timed
    bound: float

    @property
    def gap(self) -> float:
        """By what part of the bound the period is above it."""
        return self.timed.period / self.bound - 1 if self.bound else 0.0


def search(problem: Problem, effort: int = WORK) -> _Found:
    """A schedule of short period whose tasks are ahead only as far as that takes.

    `effort` is how much work small problems are given.

    Raises PlanError (E404) where a cycle of edges has a distance of 0 or less.
    """
    best: Timed | None = None
    for kernel in lists(problem):
        timed = timed_kernel(problem, kernel)
        if best is None or timed.period < best.period * BETTER:
            best = timed
        if best.period <= problem.bound * AT_BOUND:
            break
    assert best is not None
    if len(problem.tasks) > SLOT_TASKS:
        best = _halved(problem, best)
    best, bound = _improved(problem, best), problem.bound
    if len(problem.tasks) <= FIT_TASKS:
        best, bound = fitted(problem, best, effort)
    return _Found(timed=_compacted(problem, best), bound=bound)


def lists(problem: Problem) -> Iterator[Kernel]:
    """Kernels by list scheduling, for one priority after another; then the order declared."""
    base, seconds = problem.base, problem.seconds
    arcs = arcs_in_order(turn_edges(problem.edges_needed, base.ahead), base.order)
    back = [(target, source, distance) for source, target, distance in reversed(arcs)]
    path = [0.0] * len(seconds)
    for target, source, distance in back:
        if distance == 0:
            path[source] = max(path[source], path[target] + seconds[target])
    yield _list(problem, arcs, path)
    # What follows a task around the recurrences too: the later, the less it matters.
    tails, _ = relax(seconds, back, problem.bound * AT_BOUND)
    yield _list(problem, arcs, tails)
    yield base


def _list(problem: Problem, arcs: Sequence[Arc], tails: Sequence[float]) -> Kernel:
    """The order in which one turn starts its tasks, those with most seconds after them first."""
    base, seconds = problem.base, problem.seconds
    followers: list[list[int]] = [[] for _ in seconds]
    waiting = [0] * len(seconds)
    for source, target, distance in arcs:
        if distance == 0:
            followers[source].append(target)
            waiting[target] += 1
    mine: list[list[int]] = [[] for _ in seconds]
    for number, queue in enumerate(problem.queues):
        for task in queue:
            mine[task].append(number)
    ready: dict[tuple[int, ...], list[tuple[float, int]]] = {tuple(q): [] for q in mine}
    for task in base.order:
        if not waiting[task]:
            heapq.heappush(ready[tuple(mine[task])], (-tails[task] - seconds[task], task))
    free = [0.0] * len(problem.queues)
    running: list[tuple[float, int]] = []
    order: list[int] = []
    now = 0.0
    while len(order) < len(seconds):
        idle = [h for qs, h in ready.items() if h and all(free[q] <= now for q in qs)]
        if idle:
            _, task = heapq.heappop(min(idle))
            order.append(task)
            end = now + seconds[task]
            for number in mine[task]:
                free[number] = end
            heapq.heappush(running, (end, task))
            continue
        now, done = heapq.heappop(running)
        for follower in followers[done]:
            waiting[follower] -= 1
            if not waiting[follower]:
                entry = (-tails[follower] - seconds[follower], follower)
                heapq.heappush(ready[tuple(mine[follower])], entry)
    return Kernel(order=tuple(order), ahead=base.ahead)


def _halved(problem: Problem, timed: Timed) -> Timed:
    """The best for which slots are found, halving in on the bound."""
    low = problem.bound
    for _ in range(HALVINGS):
        if timed.period <= low * NEAR:
            break
        target = (low + timed.period) / 2 if low > problem.bound else low * AT_BOUND
        schedule = slotted(problem, target)
        if schedule is None:
            low = target
            continue
        found = timed_kernel(problem, kernel_of(problem, schedule))
        timed = min(timed, found, key=lambda timed: timed.period)
    return timed


def _improved(problem: Problem, timed: Timed) -> Timed:
    """The best that swaps of neighbours on the slowest cycle lead to, each one a gain."""
    left = min(MOVES, MOVED_TASKS // len(problem.tasks))
    while True:
        for kernel in _neighbours(problem, timed):
            left -= 1
            if left < 0 or timed.period <= problem.bound * AT_BOUND:
                return timed
            arcs = turn_arcs(problem, kernel)
            if not relax(problem.seconds, arcs, timed.period * BETTER)[1]:
                timed = timed_kernel(problem, kernel)
                break
        else:
            return timed


def _compacted(problem: Problem, timed: Timed) -> Timed:
    """As good a schedule with tasks less ahead, by swaps of neighbours that keep them ahead."""
    best = compact(problem, timed)
    longest = timed.period * AT_BOUND
    left = min(MOVES, MOVED_TASKS // len(problem.tasks))
    gained = True
    while gained and sum(best.ahead) > sum(problem.base.ahead):
        gained = False
        for kernel in _kept_ahead(problem, best):
            left -= 1
            if left < 0:
                break
            starts, cycle = relax(problem.seconds, turn_arcs(problem, kernel), longest)
            if cycle:
                continue
            moved = Timed(kernel=kernel, period=longest, starts=tuple(starts))
            shorter = compact(problem, moved)
            if sum(shorter.ahead) < sum(best.ahead):
                best, gained = shorter, True
                break
    return timed_kernel(problem, best)


def _kept_ahead(problem: Problem, kernel: Kernel) -> Iterator[Kernel]:
    """Kernels with two tasks swapped of which the first is more ahead than edges demand."""
    edges = set(turn_edges(problem.edges_needed, kernel.ahead))
    base = problem.base.ahead
    for source, target, distance in queue_arcs(problem, kernel.order):
        free = distance == 0 and (source, target, distance) not in edges
        if free and kernel.ahead[source] > base[source]:
            yield from swapped(problem, kernel, source, target)


def _neighbours(problem: Problem, timed: Timed) -> Iterator[Kernel]:
    """Kernels with two tasks swapped that follow each other on the slowest cycle for no edge."""
    kernel, critical = timed.kernel, timed.critical
    edges = turn_edges(problem.edges_needed, kernel.ahead)
    bound_by = {(source, target): distance for source, target, distance in edges}
    queued = {(s, t): d for s, t, d in queue_arcs(problem, kernel.order)}
    for source, target in zip(critical, (*critical[1:], *critical[:1]), strict=True):
        distance = queued.get((source, target))
        if source == target or distance is None:
            continue
        if bound_by.get((source, target), distance + 1) <= distance:
            continue
        start = kernel if distance == 0 else rotated(problem, kernel, target)
        yield from swapped(problem, start, source, target)
