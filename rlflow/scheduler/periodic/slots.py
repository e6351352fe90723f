"""Large periodic problems: iterative modulo scheduling (Rau 1996), for a period that is given.

The task with most seconds after it takes the first slot, modulo the period, that is free on all
its resources and after what it waits for. Where there is none it takes one all the same, and
the tasks in its way have to look for another. This file knows no orders of its own: it says
when tasks start, or that it gave up.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from rlflow.scheduler.periodic.cycles import relax
from rlflow.scheduler.periodic.problem import Problem, Schedule, arcs_in_order, turn_edges

TRIES = 3
LOOKS = 60
ROUNDING = 1e-12
NUDGE = 1 / 64


def slotted(problem: Problem, period: float) -> Schedule | None:
    """A schedule of that period; None where none was found in a few tries for every task."""
    seconds, base = problem.seconds, problem.base
    arcs = arcs_in_order(turn_edges(problem.edges_needed, base.ahead), base.order)
    back = [(target, source, distance) for source, target, distance in reversed(arcs)]
    tails, cycle = relax(seconds, back, period)
    if cycle or period < problem.resource_bound:
        return None
    board = _Board(problem, period)
    before = [-tail - duration for tail, duration in zip(tails, seconds, strict=True)]
    left = TRIES * len(seconds)
    waiting = [(want, task) for task, want in enumerate(before)]
    heapq.heapify(waiting)
    while waiting:
        _, task = heapq.heappop(waiting)
        if board.starts[task] is not None:
            continue
        left -= 1
        if left < 0 or board.looks < 0:
            return None
        for evicted in board.place(task):
            heapq.heappush(waiting, (before[evicted], evicted))
    starts = tuple(
        (start or 0.0) - ahead * period
        for start, ahead in zip(board.starts, base.ahead, strict=True)
    )
    return Schedule(period=period, starts=starts)


class _Board:
    """Which tasks have a slot, and when every queue is taken modulo the period."""

    def __init__(self, problem: Problem, period: float) -> None:
        count = len(problem.tasks)
        self.seconds, self.period = problem.seconds, period
        self.slip = ROUNDING * period
        self.looks = LOOKS * count
        self.into: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        self.out: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for source, target, turns in turn_edges(problem.edges_needed, problem.base.ahead):
            weight = self.seconds[source] - period * turns
            if source != target:
                self.into[target].append((source, weight))
                self.out[source].append((target, weight))
        self.mine: list[list[int]] = [[] for _ in range(count)]
        for number, queue in enumerate(problem.queues):
            for task in queue:
                self.mine[task].append(number)
        self.taken: list[list[tuple[float, int]]] = [[] for _ in problem.queues]
        self.starts: list[float | None] = [None] * count
        self.last: list[float | None] = [None] * count

    def place(self, task: int) -> list[int]:
        """Give a task a slot; the tasks that lose theirs for it."""
        early = 0.0
        for source, weight in self.into[task]:
            start = self.starts[source]
            if start is not None and start + weight > early:
                early = start + weight
        slot = self._free(task, early)
        evicted: list[int] = []
        if slot is None:
            last = self.last[task]
            slot = early
            if last is not None and last >= early - self.slip:
                slot = last + self.seconds[task] / 2 + NUDGE * self.period
            evicted = self._in_the_way(task, slot)
        for target, weight in self.out[task]:
            start = self.starts[target]
            if start is not None and start < slot + weight - self.slip:
                evicted.append(target)
        for other in evicted:
            self._remove(other)
        self.starts[task] = self.last[task] = slot
        for number in self.mine[task]:
            insort(self.taken[number], (self._offset(slot), task))
        return evicted

    def _free(self, task: int, early: float) -> float | None:
        """The first time from `early` on at which its queues are free, within a period."""
        slot, latest = early, early + self.period
        moved = True
        while moved:
            moved = False
            for number in self.mine[task]:
                other = self._conflict(self.taken[number], slot, self.seconds[task])
                self.looks -= 1
                if other is not None:
                    slot = other
                    moved = True
                if slot > latest or self.looks < 0:
                    return None
        return slot

    def _conflict(
        self, taken: Sequence[tuple[float, int]], slot: float, duration: float
    ) -> float | None:
        """The end of a slot taken that overlaps one wanted; None where none does.

        What takes no time may stand where a longer one begins or ends, so it hides the longer
        one: that is looked for further back.
        """
        offset = self._offset(slot)
        at = bisect_right(taken, (offset + self.slip, len(self.seconds)))
        for place in range(at - 1, at - 1 - len(taken), -1):
            start, task = taken[place]
            if self.seconds[task] > self.slip:
                after = offset - start + (self.period if place < 0 else 0.0)
                begins_here = after <= self.slip and duration <= self.slip
                if self.seconds[task] - after > self.slip and not begins_here:
                    return slot - after + self.seconds[task]
                break
        if taken:
            start, task = taken[at % len(taken)]
            until = start - offset + (self.period if at == len(taken) else 0.0)
            if duration - until > self.slip:
                return slot + until + self.seconds[task]
        return None

    def _in_the_way(self, task: int, slot: float) -> list[int]:
        """The tasks that overlap one in a slot."""
        offset, duration, slip = self._offset(slot), self.seconds[task], self.slip
        found: dict[int, None] = {}
        for number in self.mine[task]:
            for start, other in self.taken[number]:
                after, lasts = offset - start, self.seconds[other]
                if after < -slip:
                    after += self.period
                beyond = max(lasts - after, duration - (self.period - after))
                if (min(lasts, duration) if after <= slip else beyond) > slip:
                    found[other] = None
        return list(found)

    def _offset(self, slot: float) -> float:
        """Seconds from the start of a period; 0 for what begins just before the next one."""
        offset = slot % self.period
        return offset if offset < self.period - self.slip else 0.0

    def _remove(self, task: int) -> None:
        start = self.starts[task]
        if start is None:
            return
        self.starts[task] = None
        for number in self.mine[task]:
            line = self.taken[number]
            del line[bisect_left(line, (self._offset(start), task))]
