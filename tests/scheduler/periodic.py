"""Periodic problems drawn at random, and independent ways to judge schedules of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from rlflow.errors import PlanError
from rlflow.scheduler.periodic.problem import Kernel, Precedence, Problem, Schedule, Task

MOST_TRIES = 3_000
DURATIONS = (
    (0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 3.0),
    (0.0, 0.0, 0.1, 0.3, 0.7, 0.431, 1 / 3),
    (0.0, 1e-12, 1.6e-9, 2.56e-8, 2.4e-4, 0.044, 1.0),
)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def problem_of(
    tasks: dict[str, tuple[float, str]], *edges: tuple[str, str, int], devices: str = "abcdef"
) -> Problem:
    """Tasks by name: seconds, and a letter for each of their devices; edges by name."""
    place = {name: index for index, name in enumerate(tasks)}
    return Problem(
        tasks=tuple(
            Task(
                name=name,
                seconds=seconds,
                resources=frozenset((devices.index(letter), "compute") for letter in letters),
            )
            for name, (seconds, letters) in tasks.items()
        ),
        edges=tuple(Precedence(place[source], place[target], d) for source, target, d in edges),
    )


@st.composite
def problems(draw: Draw, *, most: int = 8, pools: int = 3, staleness: int = 2) -> Problem:
    """Up to `most` tasks on up to `pools` devices; no task waits for itself."""
    count = draw(st.integers(1, most))
    device = st.integers(0, pools - 1)
    seconds = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0])
    tasks = tuple(
        Task(
            name=f"t{number}",
            seconds=draw(seconds),
            resources=frozenset(
                (d, "compute") for d in draw(st.sets(device, min_size=1, max_size=2))
            ),
        )
        for number in range(count)
    )
    edges: list[Precedence] = []
    task = st.integers(0, count - 1)
    for _ in range(draw(st.integers(0, 2 * count))):
        edge = Precedence(draw(task), draw(task), draw(st.integers(-staleness, 1 + staleness)))
        try:
            assert Problem(tasks=tasks, edges=(*edges, edge)).base
        except PlanError:
            continue
        edges.append(edge)
    return Problem(tasks=tasks, edges=tuple(edges))


def crowded(count: int, seed: int) -> Problem:
    """So many tasks on up to five devices, of few durations that are equal, 0 or tiny.

    Tasks have ranks and run up to 3 iterations ahead: no edge contradicts those, so none waits
    for itself, however far below 0 distances are.
    """
    numbers = random.Random(seed)
    pools = numbers.randint(1, 5)
    seconds = numbers.choice(DURATIONS)
    tasks = tuple(
        Task(
            name=f"t{task}",
            seconds=numbers.choice(seconds),
            resources=frozenset(
                (device, "compute")
                for device in numbers.sample(range(pools), numbers.randint(1, min(2, pools)))
            ),
        )
        for task in range(count)
    )
    ahead = [numbers.randint(0, 3) for _ in tasks]
    rank = numbers.sample(range(count), count)
    edges = []
    for _ in range(numbers.randint(count // 2, 2 * count)):
        one, two = numbers.randrange(count), numbers.randrange(count)
        turns = int(rank[one] >= rank[two]) + numbers.choice([0, 0, 0, 1])
        edges.append(Precedence(one, two, turns + ahead[two] - ahead[one]))
    return Problem(tasks=tasks, edges=tuple(edges))


def broken(problem: Problem, schedule: Schedule, iterations: int = 6) -> list[str]:
    """What a schedule does wrong when it is unrolled; [] if nothing."""
    slip = 1e-6 * max(schedule.period, 1.0)
    begin = {
        (task, i): start + i * schedule.period
        for task, start in enumerate(schedule.starts)
        for i in range(iterations)
    }
    wrong = []
    for (task, i), start in begin.items():
        for source, target, distance in problem.edges:
            before = begin.get((source, i - distance))
            if target != task or before is None:
                continue
            if start < before + problem.seconds[source] - slip:
                wrong.append(f"{task}@{i} starts before {source}@{i - distance} ends")
    for one, other in itertools.combinations(range(len(problem.tasks)), 2):
        if not problem.tasks[one].resources & problem.tasks[other].resources:
            continue
        for i, j in itertools.product(range(iterations), repeat=2):
            first, second = begin[one, i], begin[other, j]
            late = first + problem.seconds[one] <= second + slip
            if not late and second + problem.seconds[other] > first + slip:
                wrong.append(f"{one}@{i} and {other}@{j} overlap")
    return wrong


def played(problem: Problem, kernel: Kernel, turns: int) -> Iterator[dict[int, float]]:
    """Ends of every task in every turn where each starts as soon as it may.

    Turn by turn and in the kernel's order on every resource; KeyError where a task waits for
    one that comes later.
    """
    ends: dict[tuple[int, int], float] = {}
    free: dict[tuple[int, str], float] = {}
    for turn in range(-max(kernel.ahead), turns):
        now = {}
        for task in kernel.order:
            i = turn + kernel.ahead[task]
            if i < 0:
                continue
            sources = [(s, i - d) for s, t, d in problem.edges if t == task and i - d >= 0]
            start = max([ends[source] for source in sources], default=0.0)
            resources = problem.tasks[task].resources
            start = max([start, *(free.get(resource, 0.0) for resource in resources)])
            ends[task, i] = now[task] = start + problem.seconds[task]
            free.update(dict.fromkeys(resources, now[task]))
        if turn >= 0:
            yield now


def growth(problem: Problem, kernel: Kernel) -> float:
    """Seconds that a turn adds once all is in its stride, of the task that is last."""
    ends = [max(now.values()) for now in played(problem, kernel, 240)]
    return (ends[-1] - ends[119]) / 120


def shortest_period(problem: Problem, reach: int = 2) -> float:
    """The optimum, by trying every cyclic order on every resource and offsets up to `reach`.

    Offsets count from the least by which distances below 0 ask tasks to be ahead.
    """
    queues = dict.fromkeys(problem.users.values())
    per_queue = [around(queue, reach, problem.base.ahead) for queue in queues]
    tries = math.prod(len(lines) for lines in per_queue)
    if tries > MOST_TRIES:
        raise ValueError(f"{tries} orders")
    best = sum(problem.seconds) * 4 + 1.0
    for lines in itertools.product(*per_queue):
        arcs = [*problem.edges, *itertools.chain(*lines)]
        if not feasible(problem, arcs, best * (1 - 1e-7)):
            continue
        low, high = 0.0, best
        while high - low > 1e-8 * best:
            middle = (low + high) / 2
            low, high = (low, middle) if feasible(problem, arcs, middle) else (middle, high)
        best = high
    return best


def around(
    queue: tuple[int, ...], reach: int, ahead: tuple[int, ...]
) -> list[list[tuple[int, int, int]]]:
    """The arcs of every cyclic order of a queue, iterations shifted by every offset."""
    first, *others = queue
    lines = []
    for line in itertools.permutations(others):
        for offsets in itertools.product(range(-reach, reach + 1), repeat=len(line)):
            ring = [(first, 0), *zip(line, offsets, strict=True), (first, 1)]
            lines.append(
                [(a, b, t - s + ahead[b] - ahead[a]) for (a, s), (b, t) in itertools.pairwise(ring)]
            )
    return lines


def feasible(problem: Problem, arcs: list[tuple[int, int, int]], period: float) -> bool:
    """Whether starts exist that honour all arcs: no cycle is longer than the period (Floyd)."""
    count = range(len(problem.tasks))
    longest = {(a, b): float("-inf") for a in count for b in count}
    for source, target, distance in arcs:
        weight = problem.seconds[source] - period * distance
        longest[source, target] = max(weight, longest[source, target])
    for middle, a, b in itertools.product(count, repeat=3):
        longest[a, b] = max(longest[a, b], longest[a, middle] + longest[middle, b])
    return all(longest[task, task] <= 1e-9 for task in count)
