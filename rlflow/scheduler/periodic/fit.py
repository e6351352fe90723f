"""Small periodic problems nearly exactly: whether there is a schedule of a given period.

For a fixed period T all that is left to choose is, for every two tasks of a resource, by how
many periods one follows the other: the start of j less that of i lies in
[k T + seconds(i), (k + 1) T - seconds(j)] for some whole k. A matrix of the longest paths
between all tasks leaves few k for most pairs, and one for many, which lengthens other paths
(constraint-based scheduling; Cesta, Oddi and Smith 2002). A search decides the tightest pair
first; feasibility grows with T, so T is halved in on. The work is counted, and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from rlflow.scheduler.periodic.cycles import components
from rlflow.scheduler.periodic.problem import (
    Precedence,
    Problem,
    Schedule,
    Timed,
    kernel_of,
    timed_kernel,
)

FIT_TASKS = 60
WORK = 3_000_000
ROUGH_WORK = 100_000
ATTEMPTS = 7
RESTARTS = 4
SHAKEN = 0.2
WINDOW = 2
GOOD = 1e-6
ROUNDING = 1e-9

Matrix = list[list[float]]
Pair = tuple[int, int, float, float]


@dataclass(slots=True, kw_only=True)
class Work:
    """Entries of matrices that may still be computed."""

    left: int


class OutOfWork(Exception):
    """The search stopped before it knew."""


def fitted(problem: Problem, timed: Timed, effort: int = WORK) -> tuple[Timed, float]:
    """A schedule as good as `timed` or better, and a period that none is proven to go below."""
    low = proven = problem.bound
    work = Work(left=effort)
    for attempt in range(ATTEMPTS):
        if timed.period <= low * (1 + GOOD):
            break
        # The bound itself, then in turns what would prove the best to be it, and the middle.
        target = timed.period * (1 - GOOD) if attempt % 2 else (low + timed.period) / 2
        if attempt == 0:
            target = low * (1 + ROUNDING)
        share = work.left // 2
        for restart in range(RESTARTS):
            tried = Work(left=share >> RESTARTS - max(restart, 1))
            work.left -= tried.left
            try:
                found = fit(problem, target, tried, restart)
            except OutOfWork:
                continue
            work.left += tried.left
            if found is None:
                low = proven = max(low, target)
            elif found.period < timed.period:
                timed = found
            break
        else:
            low = max(low, target)
    return timed, proven


def fit(problem: Problem, period: float, work: Work, restart: int = 0) -> Timed | None:
    """A schedule of that period or a shorter one; None where there is none.

    A search that went wrong early seldom recovers: each `restart` decides in another order
    (Gomes, Selman and Kautz 1998). Raises OutOfWork.
    """
    matrix, complete = _edges_kept(problem, period, work)
    starts = _decide(problem, matrix, period, work, restart) if matrix else None
    if starts is None and not complete:
        matrix = paths_of_cycles(problem, period, work)
        starts = _decide(problem, matrix, period, work, restart) if matrix else None
    if starts is None:
        return None
    schedule = Schedule(period=period, starts=tuple(starts))
    return timed_kernel(problem, kernel_of(problem, schedule))


def _decide(
    problem: Problem, matrix: Matrix, period: float, work: Work, restart: int
) -> list[float] | None:
    """Starts at which no two tasks of a resource overlap, depth first; None if there are none."""
    random = Random(restart) if restart else None  # noqa: S311
    stack: list[tuple[Matrix, list[Pair], list[tuple[Pair, int]]]] = []
    state = _propagated(matrix, shared_pairs(problem), period, work)
    while True:
        if state is not None:
            matrix, pairs = state
            if not pairs:
                return matrix[0]
            pair, choices = _tightest(matrix, pairs, period, random)
            stack.append((matrix, pairs, [(pair, k) for k in choices]))
        while stack and not stack[-1][2]:
            stack.pop()
        if not stack:
            return None
        matrix, pairs, left = stack[-1]
        pair, k = left.pop()
        matrix = matrix.copy()
        state = None
        if _decided(matrix, pair, k, period, work):
            state = _propagated(matrix, [p for p in pairs if p is not pair], period, work)


def shared_pairs(problem: Problem) -> list[Pair]:
    """Every two tasks that share a resource, and their seconds."""
    seconds = problem.seconds
    pairs: dict[tuple[int, int], None] = {}
    for queue in problem.queues:
        for number, one in enumerate(queue):
            pairs.update(((one, other), None) for other in queue[number + 1 :])
    return [(i, j, seconds[i], seconds[j]) for i, j in pairs]


def _edges_kept(problem: Problem, period: float, work: Work) -> tuple[Matrix | None, bool]:
    """Longest paths over all edges, with nothing a few periods before anything else.

    None where a cycle is too long for the period. Also whether the limit excludes nothing.
    """
    matrix = _longest(problem, problem.edges_needed, period, work)
    if matrix is None:
        return None, True
    window = -(math.ceil(max(map(max, matrix)) / period) + WINDOW) * period
    complete = min(map(min, matrix)) >= window
    if not complete:
        limits = [
            (i, j, window) for i, row in enumerate(matrix) for j, x in enumerate(row) if x < window
        ]
        for i, j, weight in limits:
            matrix[i][j] = weight
        matrix = matrix if _floyd(matrix, period, work) else None
    return matrix, complete


def cyclic_components(problem: Problem) -> list[list[int]]:
    """The tasks that cycles of edges join, part by part."""
    out: list[list[int]] = [[] for _ in problem.tasks]
    for source, target, _ in problem.edges_needed:
        out[source].append(target)
    return components(out)


def edges_within(problem: Problem, parts: list[list[int]]) -> list[Precedence]:
    """The edges on cycles, which alone decide the period."""
    part_of = {task: number for number, part in enumerate(parts) for task in part}
    return [edge for edge in problem.edges_needed if part_of[edge[0]] == part_of[edge[1]]]


def paths_of_cycles(problem: Problem, period: float, work: Work) -> Matrix | None:
    """Longest paths over the edges on cycles; None where one is too long for the period.

    By whole periods a part can be moved at will, and so that the edges between parts hold: the
    first task of each starts less than a period after that of the first part.
    """
    parts = cyclic_components(problem)
    matrix = _longest(problem, edges_within(problem, parts), period, work)
    if matrix is None:
        return None
    for part in parts[1:]:
        matrix[parts[0][0]][part[0]] = 0.0
        matrix[part[0]][parts[0][0]] = -period
    return matrix if _floyd(matrix, period, work) else None


def _longest(
    problem: Problem, edges: Iterable[Precedence], period: float, work: Work
) -> Matrix | None:
    """Longest paths between all tasks; None where a cycle is too long for the period."""
    count = len(problem.tasks)
    matrix = [[-math.inf] * count for _ in range(count)]
    for task in range(count):
        matrix[task][task] = 0.0
    for source, target, distance in edges:
        weight = problem.seconds[source] - period * distance
        matrix[source][target] = max(weight, matrix[source][target])
    return matrix if _floyd(matrix, period, work) else None


def _floyd(matrix: Matrix, period: float, work: Work) -> bool:
    """Close a matrix under paths (Floyd 1962); False where a cycle is too long."""
    _spend(work, len(matrix) ** 3 // 2)
    for middle, through in enumerate(matrix):
        for row in matrix:
            base = row[middle]
            if base > -math.inf and row is not through:
                row[:] = [
                    a if a >= base + b else base + b for a, b in zip(row, through, strict=True)
                ]
    return all(row[task] <= ROUNDING * period for task, row in enumerate(matrix))


def _propagated(
    matrix: Matrix, pairs: list[Pair], period: float, work: Work
) -> tuple[Matrix, list[Pair]] | None:
    """Decide what has one choice left until nothing has; None where something has none."""
    changed = True
    while changed:
        changed = False
        undecided = []
        _spend(work, 4 * len(pairs))
        for pair in pairs:
            least, most = whole_periods(matrix, pair, period)
            if least > most:
                return None
            if least < most:
                undecided.append(pair)
            elif not _decided(matrix, pair, least, period, work):
                return None
            else:
                changed = True
        pairs = undecided
    return matrix, pairs


def whole_periods(matrix: Matrix, pair: Pair, period: float) -> tuple[int, int]:
    """The least and the most periods by which the second of a pair may follow the first."""
    i, j, first, second = pair
    least = math.ceil((matrix[i][j] + second) / period - 1 - ROUNDING)
    return least, math.floor((first + matrix[j][i]) / -period + ROUNDING)


def _decided(matrix: Matrix, pair: Pair, k: int, period: float, work: Work) -> bool:
    """Let j follow i by k periods; False where that makes a cycle too long."""
    i, j, first, second = pair
    return _lengthen(matrix, i, j, k * period + first, period, work) and _lengthen(
        matrix, j, i, second - (k + 1) * period, period, work
    )


def _lengthen(matrix: Matrix, i: int, j: int, weight: float, period: float, work: Work) -> bool:
    """Add an arc and the paths over it, in rows of their own; False where a cycle is too long."""
    slip = ROUNDING * period
    if weight <= matrix[i][j] + slip * 1e-2:
        return True
    if weight + matrix[j][i] > slip:
        return False
    through = matrix[j]
    rows = 0
    for a, row in enumerate(matrix):
        base = row[i] + weight
        if base > row[j]:
            matrix[a] = [
                x if x >= base + y else base + y for x, y in zip(row, through, strict=True)
            ]
            rows += 1
    _spend(work, rows * len(matrix) + 10)
    return True


def _tightest(
    matrix: Matrix, pairs: list[Pair], period: float, random: Random | None
) -> tuple[Pair, list[int]]:
    """The pair whose best choice leaves the least room, and its choices, best last.

    With random numbers nearly the least: by up to a fifth of a period.
    """
    best: tuple[float, Pair, list[tuple[float, int]]] | None = None
    for pair in pairs:
        i, j, first, second = pair
        low, high = matrix[i][j], -matrix[j][i]
        least, most = whole_periods(matrix, pair, period)
        rooms = []
        for k in range(least, most + 1):
            start, end = k * period + first, (k + 1) * period - second
            rooms.append((min(high, end) - max(low, start), k))
        room = max(rooms)[0]
        room += random.random() * SHAKEN * period if random else 0.0
        if best is None or room < best[0]:
            best = room, pair, rooms
    assert best is not None
    return best[1], [k for _, k in sorted(best[2])]


def _spend(work: Work, entries: int) -> None:
    work.left -= entries
    if work.left < 0:
        raise OutOfWork
