"""Periodic scheduling in the abstract: tasks, edges with distances, exclusive resources.

A schedule has a period T and a start for every task: an edge holds where
start(target) >= start(source) + seconds(source) - T * distance, and no two tasks of a resource
overlap modulo T (cyclic job shop; Hanen and Munier 1995, Brucker and Kampmeyer 2008). A kernel
is what is left of a schedule without its clock: the order within a turn, and by how many
iterations each task is ahead. Times are seconds, distances iterations or, in a kernel, turns.
This file knows neither plans nor how good schedules are found.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from rlflow.errors import Finding, PlanError
from rlflow.scheduler.periodic.cycles import Arc, Cycle, relax, slowest_cycle, steady_starts

Resource = tuple[int, str]
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What takes `seconds` of all its `resources` at once, alone on each: (device, lane)."""

    name: str
    seconds: float
    resources: frozenset[Resource] = frozenset()


class Precedence(NamedTuple):
    """Task `target` starts when `source`, `distance` iterations earlier, has ended.

    Both are positions in `Problem.tasks`. A distance below 0 is that many iterations later.
    """

    source: int
    target: int
    distance: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tasks that are done once an iteration, and the edges between them."""

    tasks: tuple[Task, ...]
    edges: tuple[Precedence, ...] = ()

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The duration of every task."""
        return tuple(task.seconds for task in self.tasks)

    @cached_property
    def users(self) -> dict[Resource, tuple[int, ...]]:
        """The tasks of every resource, in their order; resources sorted."""
        users: dict[Resource, list[int]] = {}
        for index, task in enumerate(self.tasks):
            for resource in task.resources:
                users.setdefault(resource, []).append(index)
        return {resource: tuple(users[resource]) for resource in sorted(users)}

    @cached_property
    def queues(self) -> tuple[tuple[int, ...], ...]:
        """The different sets of tasks of which no two may overlap.

        Resources with the same tasks count once, and a few that have some of another's not at
        all: what holds for the larger set holds for them.
        """
        distinct = tuple(dict.fromkeys(self.users.values()))
        if len(distinct) > MANY_QUEUES:
            return distinct
        sets = [frozenset(queue) for queue in distinct]
        return tuple(
            queue
            for queue, mine in zip(distinct, sets, strict=True)
            if not any(mine < other for other in sets)
        )

    @cached_property
    def edges_needed(self) -> tuple[Precedence, ...]:
        """The edges, of those between the same two tasks only the one of least distance."""
        least: dict[tuple[int, int], int] = {}
        for source, target, distance in self.edges:
            known = least.get((source, target))
            if known is None or distance < known:
                least[source, target] = distance
        return tuple(Precedence(*ends, distance) for ends, distance in least.items())

    @cached_property
    def resource_bound(self) -> float:
        """Seconds of the busiest resource in a period; no schedule has a shorter one."""
        return self.busiest[1]

    @cached_property
    def busiest(self) -> tuple[Resource | None, float]:
        """The busiest resource and its seconds in a period; the first of equals."""
        best: tuple[Resource | None, float] = None, 0.0
        loads = dict.fromkeys(self.users.values(), 0.0)
        for queue in loads:
            loads[queue] = sum(self.seconds[task] for task in queue)
        for resource, queue in self.users.items():
            if loads[queue] > best[1]:
                best = resource, loads[queue]
        return best

    @cached_property
    def base(self) -> Kernel:
        """The kernel of the edges alone: tasks as little ahead as they demand.

        Raises PlanError (E404) where a cycle has a distance of 0 or less: each of its tasks
        would wait for itself.
        """
        count = len(self.tasks)
        ahead = least_ahead(count, self.edges_needed)
        if ahead is not None:
            order = sorted_tasks(turn_edges(self.edges_needed, ahead), range(count))
            if order is not None:
                return Kernel(order=order, ahead=ahead)
        # A distance of d weighs (count + 1) d - 1: no simple cycle above 0 gets to 0.
        _, cycle = relax([1.0] * count, self.edges_needed, count + 1)
        names = [self.tasks[task].name for task, _ in (*cycle, cycle[0])]
        raise PlanError(
            Finding(
                code="E404",
                what=f"{names[0]!r} waits for itself",
                got=" -> ".join(names),
                expected="an earlier iteration somewhere on the way around",
            )
        )

    @cached_property
    def recurrence(self) -> Cycle:
        """The cycle of edges with most seconds a distance; no period is shorter than that.

        Raises PlanError (E404) where a cycle has a distance of 0 or less.
        """
        arcs = turn_edges(self.edges_needed, self.base.ahead)
        return slowest_cycle(self.seconds, arcs_in_order(arcs, self.base.order))

    @cached_property
    def bound(self) -> float:
        """The larger of the resource bound and the recurrence bound."""
        return max(self.resource_bound, self.recurrence.ratio)


MANY_QUEUES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Every task of iteration i starts at `starts` + i * `period`, in seconds."""

    period: float
    starts: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The tasks in their order within a turn; in turn t each runs iteration t + `ahead`."""

    order: tuple[int, ...]
    ahead: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A kernel with its clock: the shortest period, a slowest cycle, and when tasks start.

    `starts` are offsets in a turn: iteration i of a task starts at
    `starts` + (i - ahead) * `period`.
    """

    kernel: Kernel
    period: float
    critical: tuple[int, ...] = ()
    starts: tuple[float, ...] = field(default=(), repr=False)

    def schedule(self) -> Schedule:
        """The starts by iteration, the earliest at 0."""
        pairs = zip(self.starts, self.kernel.ahead, strict=True)
        starts = [start - self.period * ahead for start, ahead in pairs]
        first = min(starts, default=0.0)
        return Schedule(period=self.period, starts=tuple(start - first for start in starts))


def least_ahead(count: int, edges: Iterable[Precedence]) -> tuple[int, ...] | None:
    """The least numbers from 0 for which no edge goes back in turns; None if there are none.

    An edge of distance d spans d + ahead(source) - ahead(target) turns. The solutions of
    such inequalities are closed under the minimum, so one is least for all tasks at once.
    """
    ahead = [0] * count
    into: list[list[Precedence]] = [[] for _ in range(count)]
    waiting: deque[int] = deque()
    most = 0
    for edge in edges:
        into[edge.target].append(edge)
        if edge.distance < 0:
            waiting.append(edge.target)
            most -= edge.distance
    while waiting:
        task = waiting.popleft()
        for source, _, distance in into[task]:
            if ahead[source] < ahead[task] - distance:
                ahead[source] = ahead[task] - distance
                waiting.append(source)
                if ahead[source] > most:
                    return None
    return tuple(ahead)


def turn_arcs(problem: Problem, kernel: Kernel) -> list[Arc]:
    """The edges in turns and each resource's order, in the kernel's order of their sources."""
    edges = turn_edges(problem.edges_needed, kernel.ahead)
    return arcs_in_order([*edges, *queue_arcs(problem, kernel.order)], kernel.order)


def arcs_in_order(arcs: list[Arc], order: Sequence[int]) -> list[Arc]:
    """Arcs in the order of their sources."""
    place = task_positions(order)
    return sorted(arcs, key=lambda arc: place[arc[0]])


def turn_edges(edges: Iterable[Precedence], ahead: Sequence[int]) -> list[Arc]:
    """The edges with their distances in turns."""
    return [(s, t, d + ahead[s] - ahead[t]) for s, t, d in edges]


def queue_arcs(problem: Problem, order: Sequence[int]) -> list[Arc]:
    """Each resource's tasks one after another, a turn's first after the last of the one before."""
    place = task_positions(order)
    arcs: dict[Arc, None] = {}
    for queue in problem.queues:
        line = sorted(queue, key=place.__getitem__)
        arcs.update(((a, b, 0), None) for a, b in itertools.pairwise(line))
        arcs[line[-1], line[0], 1] = None
    return list(arcs)


def task_positions(order: Sequence[int]) -> list[int]:
    """The position of every task in an order."""
    place = [0] * len(order)
    for position, task in enumerate(order):
        place[task] = position
    return place


def timed_kernel(problem: Problem, kernel: Kernel) -> Timed:
    """The period of a kernel: its slowest cycle of edges and of the order on resources."""
    arcs = turn_arcs(problem, kernel)
    found = slowest_cycle(problem.seconds, arcs, floor=problem.bound)
    critical = found.tasks or bounding_cycle(problem, kernel.order)
    starts: Sequence[float] = found.starts
    if critical:
        starts = steady_starts(problem.seconds, arcs, found.ratio, critical[0])
    return Timed(kernel=kernel, period=found.ratio, critical=critical, starts=tuple(starts))


def bounding_cycle(problem: Problem, order: Sequence[int]) -> tuple[int, ...]:
    """The tasks of the larger of the two bounds, in their order."""
    resource, seconds = problem.busiest
    if resource is None or problem.recurrence.ratio > seconds * (1 + TOLERANCE):
        return problem.recurrence.tasks
    place = task_positions(order)
    return tuple(sorted(problem.users[resource], key=place.__getitem__))


def compact(problem: Problem, timed: Timed) -> Kernel:
    """The same order on resources with every task as little ahead as that order allows.

    Neither the period nor what runs beside what changes: turns begin elsewhere. Within a turn
    tasks are in the order of their starts.
    """
    kernel = timed.kernel
    ahead = kernel.ahead
    arcs = [
        Precedence(s, t, d - ahead[s] + ahead[t])
        for s, t, d in itertools.chain(
            turn_edges(problem.edges_needed, ahead), queue_arcs(problem, kernel.order)
        )
    ]
    least = least_ahead(len(problem.tasks), arcs)
    if least is None:
        raise ValueError("tasks of a turn wait for each other")
    moved = zip(timed.starts, ahead, least, strict=True)
    wanted = [start - timed.period * (before - after) for start, before, after in moved]
    return _kernel(turn_edges(arcs, least), least, wanted)


def kernel_of(problem: Problem, schedule: Schedule) -> Kernel:
    """The kernel of a schedule: its order modulo the period, tasks as little ahead as it allows.

    An edge that does not hold is honoured by moving tasks by whole periods. Raises ValueError
    where that order takes longer, because tasks of a resource overlap or a cycle is too long.
    """
    period, offsets = schedule.period, _offsets(schedule)
    ahead = _stages(problem, period, offsets)
    shares = [duration / period for duration in problem.seconds]
    # Intervals that do not overlap are in the order of their middles, empty ones too.
    middles = [offset + share / 2 for offset, share in zip(offsets, shares, strict=True)]
    arcs = turn_edges(problem.edges_needed, ahead)
    timed = timed_kernel(problem, _kernel(arcs, ahead, middles))
    if timed.period > period * (1 + 1e-6):
        raise ValueError("two tasks of a resource overlap")
    return compact(problem, timed)


def settled(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with tasks moved by whole periods so that every edge holds.

    Raises ValueError where none does that.
    """
    period, offsets = schedule.period, _offsets(schedule)
    moved = zip(offsets, _stages(problem, period, offsets), strict=True)
    return Schedule(period=period, starts=tuple((o - ahead) * period for o, ahead in moved))


def _stages(problem: Problem, period: float, offsets: Sequence[float]) -> tuple[int, ...]:
    """By how many iterations each task is ahead at the least where it starts at an offset."""
    shares = [duration / period for duration in problem.seconds]
    stages = [
        Precedence(s, t, d - math.ceil(offsets[s] + shares[s] - offsets[t] - 2 * TOLERANCE))
        for s, t, d in problem.edges_needed
    ]
    ahead = least_ahead(len(shares), stages)
    if ahead is None:
        raise ValueError("a cycle of edges is longer than the period")
    return ahead


def _offsets(schedule: Schedule) -> list[float]:
    """Starts in a turn, in periods, where turns begin in the widest gap between two starts.

    So no rounding moves a start from the end of a turn to the beginning of the next.
    """
    spots = [start / schedule.period % 1 for start in schedule.starts]
    line = sorted(spots)
    gaps = [(after - before, before) for before, after in itertools.pairwise(line)]
    width, before = max([(1 - line[-1] + line[0], line[-1]), *gaps])
    origin = before + width / 2
    return [(spot - origin) % 1 for spot in spots]


def _kernel(arcs: Iterable[Arc], ahead: tuple[int, ...], wanted: Sequence[float]) -> Kernel:
    order = sorted_tasks(arcs, wanted)
    if order is None:
        raise ValueError("tasks of a turn wait for each other")
    return Kernel(order=order, ahead=ahead)


def sorted_tasks(arcs: Iterable[Arc], wanted: Sequence[float]) -> tuple[int, ...] | None:
    """Sources of arcs within a turn before their targets, else by what is wanted, then in order.

    None where arcs of a turn make a circle.
    """
    followers: list[list[int]] = [[] for _ in wanted]
    waiting = [0] * len(wanted)
    for source, target, distance in arcs:
        if distance == 0:
            followers[source].append(target)
            waiting[target] += 1
    ready = [(want, task) for task, want in enumerate(wanted) if not waiting[task]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, task = heapq.heappop(ready)
        found.append(task)
        for follower in followers[task]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (wanted[follower], follower))
    return tuple(found) if len(found) == len(wanted) else None
