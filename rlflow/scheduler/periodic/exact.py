"""The shortest period there is: an exact solver on top of a schedule found otherwise.

OR-tools CP-SAT is asked whether there is a schedule of a given period, for shorter and shorter
ones: with the period a number, and for every two tasks of a resource one of a few whole numbers
of periods between them, all constraints are differences of two starts. Times are whole numbers
of 1e-7 of the period, and durations rounded down, so a "no" holds for the problem itself. Only
edges on cycles take part: parts that no cycle joins can be moved by whole periods. This file
needs `ortools`, and reads nothing but problems.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.errors import Finding, UsageError
from rlflow.scheduler.periodic.fit import (
    Matrix,
    Pair,
    Work,
    cyclic_components,
    edges_within,
    paths_of_cycles,
    shared_pairs,
    whole_periods,
)
from rlflow.scheduler.periodic.problem import (
    Problem,
    Schedule,
    Task,
    Timed,
    kernel_of,
    timed_kernel,
)

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

UNITS = 10_000_000
CLOSE = 1e-5
SEED = 1
MOST_TASKS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best schedule known, and a period that no schedule is proven to go below."""

    timed: Timed
    bound: float

    @property
    def proven(self) -> bool:
        """Whether the period is the shortest there is, up to 1e-5 of it."""
        return self.timed.period <= self.bound * (1 + 1.1 * CLOSE)


def optimise(problem: Problem, seconds: float, *, start: Timed) -> Optimum:
    """The best schedule found in so many seconds, beginning with `start`, and a proven bound.

    One thread and a fixed seed: where it ends by proof, the result is the same everywhere. More
    than 300 tasks are left as they are. Raises UsageError (E230) where ortools is missing.
    """
    cp_model = solver_module()
    end = time.monotonic() + seconds
    best, low, asked = start, problem.bound, len(problem.tasks) <= MOST_TASKS
    shortest = True
    while asked and best.period > low * (1 + CLOSE):
        # In turns what would prove the best to be it, and the middle.
        target = best.period * (1 - CLOSE) if shortest else (low + best.period) / 2
        target = max(target, low)
        shortest = not shortest
        model = PeriodModel(cp_model, problem, target, best.schedule())
        answer, schedule = model.solve(end - time.monotonic())
        if answer is None:
            break
        if schedule is None:
            low = target
            continue
        found = timed_kernel(problem, kernel_of(model.problem, schedule))
        if found.period >= best.period:
            # Better by no more than what was rounded.
            low = max(low, best.period * (1 - CLOSE))
        else:
            best = found
    return Optimum(timed=best, bound=min(low, best.period))


def solver_module() -> Any:
    """The solver's module; UsageError where it is missing."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UsageError(
            Finding(
                code="E230",
                what="the exact order needs ortools, which is not installed",
                fix="pip install -e '.[optimize]'",
            )
        ) from error
    return cp_model


class PeriodModel:
    """Whether there is a schedule of a period: integer starts and differences of two of them."""

    def __init__(self, cp_model: Any, problem: Problem, period: float, start: Schedule) -> None:
        self.cp_model = cp_model
        self.model: CpModel = cp_model.CpModel()
        self.problem = _in_units(problem, period / UNITS)
        self.parts = cyclic_components(problem)
        count = len(problem.tasks)
        paths = paths_of_cycles(self.problem, UNITS, Work(left=2 * count**3))
        self.starts: list[IntVar] | None = self._starts(paths) if paths else None
        self.apart: dict[tuple[int, int], Any] = {}
        if paths is None or self.starts is None:
            return
        hints = _from_first_part(self.parts, start)
        for variable, hint in zip(self.starts, hints, strict=True):
            self.model.add_hint(variable, round(hint * UNITS))
        for source, target, distance in edges_within(self.problem, self.parts):
            weight = int(self.problem.seconds[source]) - UNITS * distance
            self.model.add(self.starts[target] - self.starts[source] >= weight)
        for pair in shared_pairs(self.problem):
            self._add_pair(self.starts, pair, whole_periods(paths, pair, UNITS), hints)

    def _starts(self, paths: Matrix) -> list[IntVar]:
        """Starts after that of the first part's first task, as early and late as paths allow."""
        first = self.parts[0][0]
        spread = max(paths[first]), min(paths[first]), *(-row[first] for row in paths)
        self.turns = math.ceil((max(spread) - min(spread)) / UNITS)
        return [
            self.model.new_int_var(round(low), round(-row[first]), f"start {task}")
            for task, (low, row) in enumerate(zip(paths[first], paths, strict=True))
        ]

    def _add_pair(
        self, starts: Sequence[IntVar], pair: Pair, periods: tuple[int, int], hints: Sequence[float]
    ) -> None:
        """No overlap: the second follows the first by some number of whole periods."""
        i, j, first, second = pair
        hinted = math.floor(hints[j] - hints[i] + (second - first) / 2 / UNITS)
        choices = []
        ks = range(periods[0], periods[1] + 1)
        for k in ks:
            chosen = self.model.new_bool_var(f"{i} {j} {k}")
            self.model.add_hint(chosen, k == hinted)
            apart = starts[j] - starts[i]
            self.model.add(apart >= k * UNITS + int(first)).only_enforce_if(chosen)
            self.model.add(apart <= (k + 1) * UNITS - int(second)).only_enforce_if(chosen)
            choices.append(chosen)
        self.model.add_exactly_one(choices)
        self.apart[i, j] = sum(k * chosen for k, chosen in zip(ks, choices, strict=True))
        self.apart[j, i] = -1 - self.apart[i, j]

    def solver(self, seconds: float) -> CpSolver:
        """One thread and a fixed seed, for so many seconds."""
        solver: CpSolver = self.cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = SEED
        solver.parameters.max_time_in_seconds = max(seconds, 0.0)
        return solver

    def solve(self, seconds: float) -> tuple[bool | None, Schedule | None]:
        """Yes with a schedule, no, or None where the time was up."""
        if self.starts is None:
            return False, None
        solver = self.solver(seconds)
        status = solver.solve(self.model)
        if status == self.cp_model.INFEASIBLE:
            return False, None
        if status not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return None, None
        starts = tuple(float(solver.value(start)) for start in self.starts)
        return True, Schedule(period=float(UNITS), starts=starts)


def _in_units(problem: Problem, unit: float) -> Problem:
    """The same problem in whole units of time, durations rounded down."""
    tasks = tuple(
        Task(name=task.name, seconds=float(task.seconds // unit), resources=task.resources)
        for task in problem.tasks
    )
    return Problem(tasks=tasks, edges=problem.edges)


def _from_first_part(parts: Sequence[Sequence[int]], start: Schedule) -> list[float]:
    """Starts in periods, each part moved by whole ones to begin with or after the first part."""
    origin = start.starts[parts[0][0]]
    hints = [(value - origin) / start.period for value in start.starts]
    for part in parts:
        moved = math.floor(hints[part[0]] + 1e-9)
        for task in part:
            hints[task] -= moved
    return hints
