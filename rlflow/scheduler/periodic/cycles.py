"""Cycles of a graph whose arcs have a distance: the slowest, the impossible, the slack.

An arc (source, target, distance) says that the target starts when the source, `distance`
periods earlier, has ended. The longest period that a cycle asks for is its seconds divided by
its distance: the growth of a max-plus system (Baccelli et al. 1992, theorem 3.23). Found by
raising the period from cycle to cycle until no cycle is longer than it (Dinkelbach 1967 on
Bellman-Ford). This file knows numbers only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

Arc = tuple[int, int, int]

EXACT = 1e-11
SLACK_WORK = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Seconds a distance of the slowest cycle, its tasks in order, and starts at that period.

    No tasks where no cycle is slower than the floor asked for.
    """

    ratio: float
    tasks: tuple[int, ...] = ()
    starts: tuple[float, ...] = ()


def slowest_cycle(seconds: Sequence[float], arcs: Sequence[Arc], *, floor: float = 0.0) -> Cycle:
    """The cycle with most seconds a distance, if more than `floor`.

    Arcs should stand in an order in which most values flow forward. Every cycle's distance
    has to be above 0.
    """
    period = floor
    tasks: tuple[int, ...] = ()
    while True:
        starts, cycle = relax(seconds, arcs, period)
        if not cycle:
            return Cycle(ratio=period, tasks=tasks, starts=tuple(starts))
        total = sum(seconds[source] for source, _ in cycle)
        period = max(total / sum(distance for _, distance in cycle), period)
        tasks = tuple(source for source, _ in cycle)


def relax(
    seconds: Sequence[float], arcs: Sequence[Arc], period: float
) -> tuple[list[float], list[tuple[int, int]]]:
    """Starts from 0 that honour every arc at a period, or a cycle that is too long for it.

    A cycle is (source, distance) of each of its arcs, in order. Arcs of a turn should stand
    in the order in which their sources do: then few sweeps are needed.
    """
    weighted = [(s, t, seconds[s] - period * d, d) for s, t, d in arcs]
    count = len(seconds)
    tolerance = EXACT * max(period, max(seconds, default=0.0))
    starts = [0.0] * count
    parents: list[tuple[int, int] | None] = [None] * count
    for sweep in range(count + 2):
        changed = False
        for source, target, weight, distance in weighted:
            start = starts[source] + weight
            if start > starts[target] + tolerance:
                starts[target] = start
                parents[target] = (source, distance)
                changed = True
        if not changed:
            return starts, []
        cycle = _closed(parents) if sweep else []
        if cycle:
            return starts, cycle
    raise AssertionError("longest paths do not settle")


def _closed(parents: Sequence[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """A cycle of the arcs by which tasks got their starts, in order; [] if there is none."""
    seen = [0] * len(parents)
    for number, first in enumerate(range(len(parents)), start=1):
        task = first
        while not seen[task]:
            seen[task] = number
            parent = parents[task]
            if parent is None:
                break
            task = parent[0]
        else:
            if seen[task] == number:
                return _walk(parents, task)
    return []


def _walk(parents: Sequence[tuple[int, int] | None], task: int) -> list[tuple[int, int]]:
    """The cycle of parents through a task, forward."""
    cycle: list[tuple[int, int]] = []
    at = task
    while not cycle or at != task:
        parent = parents[at]
        assert parent is not None
        cycle.append(parent)
        at = parent[0]
    cycle.reverse()
    first = min(range(len(cycle)), key=lambda place: cycle[place][0])
    return cycle[first:] + cycle[:first]


def steady_starts(
    seconds: Sequence[float], arcs: Sequence[Arc], period: float, anchor: int
) -> list[float]:
    """Starts as early as the task `anchor` lets them be, once all is in its stride.

    Tasks that do not wait for it, however far back, start as late as others allow. The period
    has to be that of the slowest cycle at least.
    """
    weighted = [(s, t, seconds[s] - period * d) for s, t, d in arcs]
    back = [(t, s, weight) for s, t, weight in reversed(weighted)]
    tolerance = EXACT * max(period, max(seconds, default=0.0))
    starts: list[float | None] = [None] * len(seconds)
    starts[anchor] = 0.0
    _settle(weighted, starts, tolerance)
    late = [None if start is None else -start for start in starts]
    _settle(back, late, tolerance)
    starts = [None if start is None else -start for start in late]
    _settle(weighted, starts, tolerance)
    starts = [0.0 if start is None else start for start in starts]
    _settle(weighted, starts, tolerance)
    return [start for start in starts if start is not None]


def _settle(
    weighted: Sequence[tuple[int, int, float]], starts: list[float | None], tolerance: float
) -> None:
    """Longest paths from the tasks whose starts are known, written to `starts`."""
    for _ in range(len(starts) + 2):
        changed = False
        for source, target, weight in weighted:
            before, known = starts[source], starts[target]
            if before is not None and (known is None or before + weight > known + tolerance):
                starts[target] = before + weight
                changed = True
        if not changed:
            return


def slack_of(
    seconds: Sequence[float], arcs: Sequence[Arc], period: float, starts: Sequence[float]
) -> list[float]:
    """Seconds by which each task may end later without any cycle getting too long.

    It is what is left of the period on the tightest cycle through the task: a shortest path
    back to it over the arcs' own slack, which starts that honour every arc make at least 0.
    The work is bounded: in a large graph a task may be told less than it has, never more.
    Infinite for a task on no cycle.
    """
    count = len(seconds)
    out: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    least_in = [math.inf] * count
    for source, target, distance in arcs:
        room = starts[target] - starts[source] - seconds[source] + period * distance
        room = room if room > EXACT * period * count else 0.0
        out[source].append((target, room))
        if source != target:
            least_in[target] = min(least_in[target], room)
    known = _free_cycles(out)
    work = SLACK_WORK
    slack = []
    for task in range(count):
        if task in known:
            slack.append(0.0)
        elif work > 0:
            found, cost = _shortest_cycle(out, task)
            work -= cost
            slack.append(found)
        else:
            own = min((room for target, room in out[task] if target == task), default=math.inf)
            least_out = min((r for t, r in out[task] if t != task), default=math.inf)
            slack.append(min(own, least_in[task] + least_out))
    return slack


def _free_cycles(out: Sequence[Sequence[tuple[int, float]]]) -> set[int]:
    """Tasks on a cycle of arcs without slack."""
    free = [[target for target, room in arcs if not room] for arcs in out]
    return {task for part in components(free) for task in part if len(part) > 1} | {
        task for task, targets in enumerate(free) if task in targets
    }


def components(out: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components, sources before what they lead to (Tarjan 1972)."""
    count = len(out)
    number, low = [0] * count, [0] * count
    stack: list[int] = []
    parts: list[list[int]] = []
    done = [False] * count
    serial = 0
    for first in range(count):
        path = [(first, iter(out[first]))] if not number[first] else []
        while path:
            task, targets = path[-1]
            if not number[task]:
                serial += 1
                number[task] = low[task] = serial
                stack.append(task)
            for target in targets:
                if not number[target]:
                    path.append((target, iter(out[target])))
                    break
                if not done[target]:
                    low[task] = min(low[task], low[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[task])
                if low[task] == number[task]:
                    parts.append(_popped(stack, task, done))
    return parts[::-1]


def _popped(stack: list[int], task: int, done: list[bool]) -> list[int]:
    """The top of a stack down to a task, taken off and marked done."""
    members: list[int] = []
    while not members or members[-1] != task:
        members.append(stack.pop())
        done[members[-1]] = True
    return members


def _shortest_cycle(out: Sequence[Sequence[tuple[int, float]]], task: int) -> tuple[float, int]:
    """The least slack of a cycle through a task (Dijkstra 1959), and the arcs looked at."""
    cost = 0
    known: dict[int, float] = {}
    heap = [(room, target) for target, room in out[task]]
    heapq.heapify(heap)
    while heap:
        room, at = heapq.heappop(heap)
        if at == task:
            return room, cost
        if at in known:
            continue
        known[at] = room
        cost += len(out[at]) + 1
        for target, more in out[at]:
            if target not in known:
                heapq.heappush(heap, (room + more, target))
    return math.inf, cost
