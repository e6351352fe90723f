"""Bounds, cycles, kernels and slack of periodic problems, computed by hand and at random."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings

from rlflow.errors import PlanError
from rlflow.scheduler.periodic.cycles import components, slack_of, slowest_cycle
from rlflow.scheduler.periodic.problem import (
    Kernel,
    Precedence,
    Problem,
    Schedule,
    Timed,
    compact,
    kernel_of,
    least_ahead,
    queue_arcs,
    timed_kernel,
    turn_arcs,
)
from rlflow.scheduler.periodic.search import search
from tests.budget import examples
from tests.scheduler.periodic import broken, growth, problem_of, problems

# rollout -> reward -> update -> (next iteration) rollout, on a device each for gen and train.
SPLIT = problem_of(
    {"rollout": (4.0, "a"), "reward": (1.0, "b"), "update": (3.0, "c")},
    ("rollout", "reward", 0),
    ("reward", "update", 0),
    ("update", "rollout", 1),
    ("update", "update", 1),
)


def slack(problem: Problem, timed: Timed) -> list[float]:
    arcs = turn_arcs(problem, timed.kernel)
    return slack_of(problem.seconds, arcs, timed.period, timed.starts)


def test_synchronous_pools_take_turns() -> None:
    """Nothing overlaps: 4 + 1 + 3."""
    timed = search(SPLIT).timed
    assert (8.0, (0, 1, 2)) == (timed.period, timed.critical)
    assert (4.0, 8.0) == (SPLIT.resource_bound, SPLIT.recurrence.ratio)
    assert Kernel(order=(0, 1, 2), ahead=(0, 0, 0)) == timed.kernel
    assert [0.0, 0.0, 0.0] == slack(SPLIT, timed)


@pytest.mark.parametrize(("staleness", "period"), [(0, 8.5), (1, 4.5), (2, 4.5)])
def test_staleness_changes_distances_and_nothing_else(staleness: int, period: float) -> None:
    """8.5 seconds over 1 + k iterations, and at least the rollout and the reshard, 4.5."""
    problem = problem_of(
        {"rollout": (4.0, "a"), "reward": (1.0, "b"), "update": (3.0, "c"), "reshard": (0.5, "ac")},
        ("rollout", "reward", 0),
        ("reward", "update", 0),
        ("update", "reshard", 0),
        ("reshard", "rollout", 1 + staleness),
        ("rollout", "reshard", -staleness),
        ("reshard", "update", 1),
    )
    timed = search(problem).timed
    assert period == timed.period
    assert (staleness, 0) == (timed.kernel.ahead[0], timed.kernel.ahead[2])
    assert growth(problem, timed.kernel) == pytest.approx(period)


def test_a_stale_rollout_on_the_weights_of_the_update_takes_turns_with_it() -> None:
    """It reads what the update writes: 4 + 3 seconds, although the pools are apart."""
    edges = (*SPLIT.edges[:2], SPLIT.edges[3], Precedence(2, 0, 2), Precedence(0, 2, -1))
    timed = search(Problem(tasks=SPLIT.tasks, edges=edges)).timed
    assert (7.0, {0, 2}) == (timed.period, set(timed.critical))


def test_a_shared_device_bounds_the_period() -> None:
    """Device a has 2 + 3 seconds, device b 4, and nothing waits: 5, with 1 second to spare on b."""
    problem = problem_of({"x": (2.0, "a"), "y": (3.0, "a"), "z": (4.0, "b")})
    timed = search(problem).timed
    assert (5.0, 0.0, 5.0) == (timed.period, problem.recurrence.ratio, problem.resource_bound)
    assert ((0, "compute"), 5.0) == problem.busiest
    assert {0, 1} == set(timed.critical)
    assert [0.0, 0.0, 1.0] == slack(problem, timed)


def test_the_order_on_a_device_can_be_what_binds() -> None:
    """x is on device a, then on b; y the other way round, and they can pass each other.

    x1 (2, a) -> x2 (1, b) -> x1 of the next iteration; y1 (2, b) -> y2 (1, a) -> y1 of the next.
    Both devices and both chains have 3 seconds, and 3 is what it takes where x1 and y1 run side
    by side; where y1 waits for x2, and y2 before the next x1, all four follow each other.
    """
    problem = problem_of(
        {"x1": (2.0, "a"), "x2": (1.0, "b"), "y1": (2.0, "b"), "y2": (1.0, "a")},
        ("x1", "x2", 0),
        ("x2", "x1", 1),
        ("y1", "y2", 0),
        ("y2", "y1", 1),
    )
    in_turns = Kernel(order=(0, 1, 2, 3), ahead=(0, 0, 0, 0))
    assert (3.0, 6.0) == (problem.bound, timed_kernel(problem, in_turns).period)
    assert 3.0 == search(problem).timed.period


def test_a_resource_that_others_contain_is_left_out() -> None:
    problem = problem_of({"x": (1.0, "abc"), "y": (1.0, "ab"), "z": (2.0, "d")})
    assert ((0, 1), (2,)) == problem.queues
    assert [(0, 1, 0), (1, 0, 1), (2, 2, 1)] == queue_arcs(problem, (0, 1, 2))


@pytest.mark.parametrize(
    "edges",
    [
        [("x", "y", 0), ("y", "x", 0)],
        [("x", "y", 1), ("y", "x", -1)],
        [("x", "y", 1), ("y", "z", -3), ("z", "x", 1)],
        [("x", "x", 0)],
        [("z", "x", 0), ("x", "y", 0), ("y", "y", -1)],
    ],
)
def test_a_task_that_waits_for_itself_is_named(edges: list[tuple[str, str, int]]) -> None:
    problem = problem_of({"x": (1.0, "a"), "y": (0.0, "a"), "z": (1.0, "b")}, *edges)
    with pytest.raises(PlanError) as refused:
        search(problem)
    (finding,) = refused.value.findings
    names = finding.got.split(" -> ")
    assert ("E404", names[0], f"{names[0]!r} waits for itself") == (
        finding.code,
        names[-1],
        finding.what,
    )
    distances = {(source, target): distance for source, target, distance in edges}
    assert sum(distances[pair] for pair in itertools.pairwise(names)) <= 0


def test_a_cycle_over_two_iterations_counts_half() -> None:
    """a -> b -> a, distance 2, of 3 + 4 seconds; c with itself, distance 1, of 3."""
    found = slowest_cycle([3.0, 4.0, 3.0], [(0, 1, 0), (1, 0, 2), (2, 2, 1), (1, 2, 0)])
    assert (3.5, (0, 1)) == (found.ratio, found.tasks)
    assert 4.0 == slowest_cycle([3.0, 4.0], [(0, 1, 0), (1, 0, 2)], floor=4.0).ratio
    assert () == slowest_cycle([3.0, 4.0], [(0, 1, 0), (1, 0, 2)], floor=4.0).tasks
    assert 0.0 == slowest_cycle([3.0, 4.0], [(0, 1, 0)]).ratio


def test_components_are_cycles_joined() -> None:
    parts = components([[1], [2, 0], [3], [4], [3], []])
    assert [{0, 1}, {2}, {3, 4}, {5}] == sorted(map(set, parts), key=min)


def test_least_ahead_is_what_negative_distances_ask_for() -> None:
    """x two iterations later comes before y, which z of the same iteration comes before."""
    assert (2, 0, 1) == least_ahead(
        3, [Precedence(0, 1, -2), Precedence(2, 1, -1), Precedence(1, 0, 3)]
    )
    assert None is least_ahead(2, [Precedence(0, 1, -2), Precedence(1, 0, 1)])


def test_a_kernel_that_starts_early_for_nothing_is_made_compact() -> None:
    early = Kernel(order=(0, 1, 2), ahead=(5, 5, 5))
    assert (0, 0, 0) == compact(SPLIT, timed_kernel(SPLIT, early)).ahead
    split = Kernel(order=(2, 0, 1), ahead=(0, 1, 1))
    timed = timed_kernel(SPLIT, split)
    assert 8.0 == timed.period
    assert Kernel(order=(0, 1, 2), ahead=(0, 0, 0)) == compact(SPLIT, timed)


def test_schedules_that_overlap_have_no_kernel() -> None:
    pair = problem_of({"x": (2.0, "a"), "y": (2.0, "a")})
    assert (0, 1) == kernel_of(pair, Schedule(period=4.0, starts=(0.0, 6.0))).order
    with pytest.raises(ValueError, match="overlap"):
        kernel_of(pair, Schedule(period=3.0, starts=(0.0, 5.0)))
    with pytest.raises(ValueError, match="longer than the period"):
        kernel_of(SPLIT, Schedule(period=5.0, starts=(0.0, 4.0, 5.0)))


@pytest.mark.slow
@given(problem=problems())
def test_a_schedule_honours_edges_and_resources(problem: Problem) -> None:
    found = search(problem)
    timed = found.timed
    assert [] == broken(problem, timed.schedule())
    assert problem.bound <= timed.period * (1 + 1e-9)
    assert found.bound <= timed.period * (1 + 1e-9)
    assert min(timed.kernel.ahead) == 0
    ahead = timed.kernel.ahead
    assert all(d + ahead[s] - ahead[t] >= 0 for s, t, d in problem.edges)


@settings(max_examples=examples(60))
@given(problem=problems())
def test_the_period_is_the_growth_that_is_measured(problem: Problem) -> None:
    timed = search(problem).timed
    assert growth(problem, timed.kernel) == pytest.approx(timed.period, rel=2e-3, abs=1e-9)
    base = timed_kernel(problem, problem.base)
    assert growth(problem, problem.base) == pytest.approx(base.period, rel=2e-3, abs=1e-9)


@given(problem=problems())
def test_the_critical_tasks_are_a_cycle_of_that_length(problem: Problem) -> None:
    timed = search(problem).timed
    by_distance = sorted(turn_arcs(problem, timed.kernel), key=lambda arc: -arc[2])
    arcs = {(source, target): distance for source, target, distance in by_distance}
    around = [*timed.critical, *timed.critical[:1]]
    if timed.period == problem.resource_bound or not timed.period:
        return
    distance = sum(arcs[pair] for pair in itertools.pairwise(around))
    seconds = sum(problem.seconds[task] for task in timed.critical)
    assert seconds / distance == pytest.approx(timed.period)


@settings(max_examples=examples(60))
@given(problem=problems(most=6))
def test_slack_is_what_a_task_can_take_longer(problem: Problem) -> None:
    timed = search(problem).timed
    rooms = slack(problem, timed)
    assert all(rooms[task] == pytest.approx(0, abs=1e-6) for task in timed.critical)
    for task, room in enumerate(rooms):
        assert timed_kernel(longer(problem, task, room), timed.kernel).period == pytest.approx(
            timed.period
        )
        more = timed_kernel(longer(problem, task, room + 0.1), timed.kernel)
        assert more.period > timed.period + 1e-3


def longer(problem: Problem, task: int, seconds: float) -> Problem:
    tasks = list(problem.tasks)
    tasks[task] = replace(tasks[task], seconds=tasks[task].seconds + seconds)
    return Problem(tasks=tuple(tasks), edges=problem.edges)


def test_slack_is_never_told_too_large_when_work_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(
        {"x": (2.0, "a"), "y": (1.0, "b"), "z": (1.0, "b"), "w": (9.0, "c")},
        ("x", "y", 0),
        ("y", "z", 0),
        ("z", "x", 1),
    )
    timed = search(problem).timed
    known = slack(problem, timed)
    monkeypatch.setattr("rlflow.scheduler.periodic.cycles.SLACK_WORK", 0)
    assert [5.0, 5.0, 5.0, 0.0] == known
    assert all(told <= room for told, room in zip(slack(problem, timed), known, strict=True))
