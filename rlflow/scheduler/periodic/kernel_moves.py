"""Changes of a kernel: turns that begin elsewhere, and tasks that come before others.

Every kernel made here honours the edges. This file judges none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlflow.scheduler.periodic.problem import Kernel, Problem, task_positions, turn_arcs, turn_edges


def rotated(problem: Problem, kernel: Kernel, task: int) -> Kernel:
    """The same schedule with turns that begin after a task: it ends the turn before instead."""
    arcs = turn_arcs(problem, kernel)
    into: list[list[int]] = [[] for _ in kernel.order]
    for source, target, distance in arcs:
        if distance == 0:
            into[target].append(source)
    moved = _behind(into, task)
    order = [t for t in kernel.order if t not in moved] + [t for t in kernel.order if t in moved]
    ahead = tuple(ahead + (t in moved) for t, ahead in enumerate(kernel.ahead))
    return Kernel(order=tuple(order), ahead=ahead)


def swapped(problem: Problem, kernel: Kernel, first: int, second: int) -> Iterator[Kernel]:
    """The kernels in which one task comes right before another that comes before it.

    Tasks between them that have to come along do: before the second moves up, or after the
    first moves down.
    """
    into: list[list[int]] = [[] for _ in kernel.order]
    out: list[list[int]] = [[] for _ in kernel.order]
    for source, target, distance in turn_edges(problem.edges_needed, kernel.ahead):
        if distance == 0:
            into[target].append(source)
            out[source].append(target)
    place = task_positions(kernel.order)
    start, end = place[first], place[second] + 1
    between = kernel.order[start:end]
    needed = _behind(into, second)
    if first in needed:
        return
    up = sorted(between, key=lambda task: task not in needed)
    yield Kernel(order=(*kernel.order[:start], *up, *kernel.order[end:]), ahead=kernel.ahead)
    later = _behind(out, first)
    down = sorted(between, key=lambda task: task in later)
    if down != up:
        yield Kernel(order=(*kernel.order[:start], *down, *kernel.order[end:]), ahead=kernel.ahead)


def _behind(neighbours: Sequence[Sequence[int]], task: int) -> set[int]:
    """A task and all that is reached from it."""
    reached = {task}
    stack = [task]
    while stack:
        for other in neighbours[stack.pop()]:
            if other not in reached:
                reached.add(other)
                stack.append(other)
    return reached
