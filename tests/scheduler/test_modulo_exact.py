"""The heuristic, the exact solver and an enumeration of every order against each other."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from rlflow.errors import UsageError
from rlflow.scheduler.exact import optimise
from rlflow.scheduler.modulo import Problem, evaluate
from rlflow.scheduler.modulo_fit import Work, fit
from rlflow.scheduler.modulo_search import search
from rlflow.scheduler.modulo_slots import slotted
from tests.scheduler.periodic import broken, problem_of, problems, shortest_period

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


@settings(max_examples=25)
@given(problem=problems(most=4, pools=2, staleness=1))
def test_what_is_proven_is_what_trying_everything_finds(problem: Problem) -> None:
    best = tried(problem)
    found = search(problem)
    assert found.timed.period == pytest.approx(best, rel=1e-5, abs=1e-6)
    assert found.bound <= best * (1 + 1e-6) + 1e-9


@settings(max_examples=25)
@given(problem=problems(most=4, pools=2, staleness=1))
def test_the_solver_finds_what_trying_everything_finds(problem: Problem) -> None:
    pytest.importorskip("ortools")
    optimum = optimise(problem, 5.0, start=evaluate(problem, problem.base))
    assert optimum.proven
    assert optimum.timed.period == pytest.approx(tried(problem), rel=2e-5, abs=1e-6)
    assert [] == broken(problem, optimum.timed.schedule())


@settings(max_examples=20)
@given(problem=problems(most=10, pools=4))
def test_the_heuristic_is_near_the_solver(problem: Problem) -> None:
    pytest.importorskip("ortools")
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


def test_an_order_between_the_bounds_and_the_first_one_is_found() -> None:
    """Device a: 2 + 1.5 + 1, chain x: 2 + 2 + 1; y fits beside x where it does not wait for z."""
    pytest.importorskip("ortools")
    best = shortest_period(CROSSING)
    found = search(CROSSING)
    optimum = optimise(CROSSING, 10.0, start=evaluate(CROSSING, CROSSING.base))
    assert 5.0 == CROSSING.bound
    assert best == pytest.approx(found.timed.period)
    assert best == pytest.approx(optimum.timed.period)
    assert optimum.proven


def test_the_solver_is_the_same_twice() -> None:
    pytest.importorskip("ortools")
    start = evaluate(CROSSING, CROSSING.base)
    assert optimise(CROSSING, 10.0, start=start) == optimise(CROSSING, 10.0, start=start)


def test_without_ortools_a_line_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UsageError) as refused:
        optimise(CROSSING, 1.0, start=search(CROSSING).timed)
    (finding,) = refused.value.findings
    assert ("E230", "pip install 'rlflow-engine[optimize]'") == (finding.code, finding.fix)
