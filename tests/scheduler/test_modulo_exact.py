"""The heuristic, the exact solver and an enumeration of every order against each other."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from rlflow.errors import UsageError
from rlflow.scheduler.periodic.exact import optimise
from rlflow.scheduler.periodic.fit import OutOfWork, Work, fit, fitted
from rlflow.scheduler.periodic.problem import Problem, Timed, kernel_of, timed_kernel
from rlflow.scheduler.periodic.search import _halved, lists, search
from rlflow.scheduler.periodic.slots import _Board, slotted
from tests.budget import examples
from tests.scheduler.periodic import broken, crowded, problem_of, problems, shortest_period

# Two devices, each with two tasks; the chains x and y cross them in opposite directions.
CROSSING = problem_of(
    {"x1": (2.0, "a"), "x2": (2.0, "b"), "y1": (1.0, "b"), "y2": (1.5, "a"), "z": (1.0, "ab")},
    ("x1", "x2", 0),
    ("x2", "x1", 1),
    ("y1", "y2", 0),
    ("y2", "y1", 1),
    ("x2", "z", 0),
    ("z", "x1", 1),
)


def tried(problem: Problem) -> float:
    """The optimum, where there are few enough orders to try."""
    try:
        return shortest_period(problem)
    except ValueError:
        reject()


@settings(max_examples=examples(12))
@given(problem=problems(most=4, pools=2, staleness=1))
@example(
    problem=problem_of(
        {"t0": (0.0, "a"), "t1": (0.0, "a"), "t2": (0.0, "a"), "t3": (0.5, "a")},
        ("t1", "t0", -1),
        ("t3", "t1", -1),
    )
)
def test_what_is_proven_is_what_trying_everything_finds(problem: Problem) -> None:
    best = tried(problem)
    found = search(problem)
    assert found.timed.period == pytest.approx(best, rel=1e-5, abs=1e-6)
    assert found.bound <= best * (1 + 1e-6) + 1e-9


@settings(max_examples=examples(12))
@given(problem=problems(most=4, pools=2, staleness=1))
def test_the_solver_finds_what_trying_everything_finds(problem: Problem) -> None:
    optimum = optimise(problem, 60.0, start=timed_kernel(problem, problem.base))
    assert optimum.proven
    assert optimum.timed.period == pytest.approx(tried(problem), rel=2e-5, abs=1e-6)
    assert [] == broken(problem, optimum.timed.schedule())


@settings(max_examples=examples(20))
@given(problem=problems(most=10, pools=4))
def test_the_heuristic_is_near_the_solver(problem: Problem) -> None:
    found = search(problem)
    optimum = optimise(problem, 2.0, start=found.timed)
    assert optimum.bound <= found.timed.period * (1 + 1e-9)
    assert found.bound <= optimum.timed.period * (1 + 1e-6) + 1e-9
    if optimum.proven:
        assert found.timed.period <= optimum.timed.period * 1.15 + 1e-9


@given(problem=problems(most=10, pools=3), share=st.sampled_from([1.0, 1.05, 1.3, 2.0]))
def test_slots_are_a_schedule_where_they_are_found(problem: Problem, share: float) -> None:
    period = problem.bound * share + 1e-6
    schedule = slotted(problem, period)
    if schedule is not None:
        assert period == schedule.period
        assert [] == broken(problem, schedule)


@given(problem=problems(most=6, pools=3))
def test_a_period_fits_if_and_only_if_it_is_long_enough(problem: Problem) -> None:
    best = search(problem).timed.period
    longer = fit(problem, best * 1.1 + 1e-6, Work(left=10**7))
    assert longer is not None
    assert longer.period <= best * 1.1 + 2e-6
    assert best <= problem.bound or fit(problem, best * 0.999, Work(left=10**7)) is None


@pytest.mark.parametrize(
    "problem",
    [
        problem_of(
            {"none": (0.0, "a"), "long": (1.0, "a"), "then": (0.0, "a")},
            ("none", "then", 0),
            ("then", "long", 0),
        ),
        problem_of(
            {
                "none": (0.0, "a"),
                "x": (1.0, "a"),
                "y": (0.0, "a"),
                "z": (0.0, "a"),
                "l": (2.0, "a"),
            },
            ("y", "l", 1),
            ("l", "z", 1),
            ("x", "y", 0),
            ("z", "x", 0),
        ),
        problem_of(
            {
                "t0": (2.0, "a"),
                "t1": (1.0, "a"),
                "t2": (2.0, "ab"),
                "t3": (0.0, "ab"),
                "t4": (1.0, "b"),
                "t5": (0.0, "ab"),
            },
            ("t3", "t0", 1),
            ("t5", "t2", 0),
            ("t2", "t3", 0),
            ("t3", "t5", 1),
            ("t4", "t2", 0),
        ),
    ],
)
def test_tasks_of_no_seconds_hide_no_others(problem: Problem) -> None:
    """They stand where a long one begins or ends, or where a turn does."""
    period = problem.bound * (1 + 1e-9)
    schedule = slotted(problem, period)
    assert schedule is not None
    assert [] == broken(problem, schedule)
    timed = timed_kernel(problem, kernel_of(problem, schedule))
    assert timed.period == pytest.approx(problem.bound)
    assert [] == broken(problem, timed.schedule())


@pytest.mark.parametrize(
    ("slot", "task", "found"),
    [
        (3.0, "one", []),
        (1.5, "one", ["long", "short"]),
        (0.0, "one", ["long"]),
        (3.5, "one", ["long"]),
        (0.0, "none", []),
        (1.0, "none", ["long"]),
    ],
)
def test_tasks_that_overlap_a_slot_are_in_its_way(slot: float, task: str, found: list[str]) -> None:
    """Of a queue with one task from 0 to 2, and one from 2 to 3, in a period of 4."""
    seconds = {"long": 2.0, "short": 1.0, "one": 1.0, "none": 0.0}
    problem = problem_of({name: (each, "a") for name, each in seconds.items()})
    names = [task.name for task in problem.tasks]
    board = _Board(problem, 4.0)
    for name in ("long", "short"):
        assert [] == board.place(names.index(name))
    assert (0.0, 2.0) == (board.starts[0], board.starts[1])
    assert found == [names[other] for other in board._in_the_way(names.index(task), slot)]


def valid(problem: Problem, timed: Timed, longest: float) -> bool:
    """Whether a kernel honours edges and resources, at its period or a longer one."""
    assert sorted(timed.kernel.order) == list(range(len(problem.tasks)))
    assert problem.bound * (1 - 1e-9) <= timed.period <= longest * (1 + 1e-6)
    return not broken(problem, timed.schedule(), iterations=2)


@settings(max_examples=examples(20))
@given(count=st.integers(40, 120), seed=st.integers(0, 2**32))
def test_lists_slots_and_halving_make_kernels_of_crowded_problems(count: int, seed: int) -> None:
    problem = crowded(count, seed)
    base = timed_kernel(problem, problem.base)
    for kernel in lists(problem):
        timed = timed_kernel(problem, kernel)
        assert valid(problem, timed, timed.period)
    for share in (1 + 1e-9, 1.05, 1.3):
        schedule = slotted(problem, problem.bound * share)
        if schedule is not None:
            timed = timed_kernel(problem, kernel_of(problem, schedule))
            assert valid(problem, timed, schedule.period)
    assert valid(problem, _halved(problem, base), base.period)
    assert valid(problem, search(problem).timed, base.period)


@pytest.mark.slow
@settings(max_examples=examples(8))
@given(count=st.integers(20, 60), seed=st.integers(0, 2**32))
def test_what_fits_is_a_kernel_of_crowded_problems(count: int, seed: int) -> None:
    problem = crowded(count, seed)
    base = timed_kernel(problem, problem.base)
    assert valid(problem, fitted(problem, base)[0], base.period)
    for share in (1.0, 1.1):
        period = problem.bound * share + 1e-6
        try:
            timed = fit(problem, period, Work(left=500_000))
        except OutOfWork:
            continue
        assert timed is None or valid(problem, timed, period)


def test_an_order_between_the_bounds_and_the_first_one_is_found() -> None:
    """Device a: 2 + 1.5 + 1, chain x: 2 + 2 + 1; y fits beside x where it does not wait for z."""
    best = shortest_period(CROSSING)
    found = search(CROSSING)
    optimum = optimise(CROSSING, 60.0, start=timed_kernel(CROSSING, CROSSING.base))
    assert 5.0 == CROSSING.bound
    assert best == pytest.approx(found.timed.period)
    assert best == pytest.approx(optimum.timed.period)
    assert optimum.proven


def test_a_search_that_goes_wrong_begins_anew() -> None:
    """26 tasks with a schedule at the bound, from which the first tries stay 13 % away."""
    problem = crowded(26, 133)
    assert search(problem).timed.period <= problem.bound * (1 + 1e-6)


def test_the_solver_is_the_same_twice() -> None:
    start = timed_kernel(CROSSING, CROSSING.base)
    assert optimise(CROSSING, 60.0, start=start) == optimise(CROSSING, 60.0, start=start)


def test_without_ortools_a_line_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UsageError) as refused:
        optimise(CROSSING, 1.0, start=search(CROSSING).timed)
    (finding,) = refused.value.findings
    assert ("E230", "pip install -e '.[optimize]'") == (finding.code, finding.fix)
