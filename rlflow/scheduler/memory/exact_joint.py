"""Order and residency together, exactly: the solver of `exact` with naps and copies beside.

Between a use of a part and its next one the part may sleep: two moves on the lanes of its
memories, and the actions through which it is away. For every action, and for every wake, what is
not away has to fit. As in `exact` the period is a number, times are whole and durations rounded
down, so a "no" holds. This file needs `ortools`, and knows neither plans nor devices.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations
from math import gcd
from typing import TYPE_CHECKING, Any

from rlflow.scheduler.memory.exact_moves import Answer, CopyMove, Joint, Slept, joint_of
from rlflow.scheduler.memory.judge import Judge, Judged
from rlflow.scheduler.periodic import exact
from rlflow.scheduler.periodic.exact import CLOSE, UNITS
from rlflow.scheduler.periodic.problem import Problem, Schedule, timed_kernel

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

MOST_TASKS = 40
MOST_NAPS = 40
ROUNDING = CLOSE / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What was found better than the start, if anything; what is proven of periods and bytes.

    No order with any residency has a period below `bound`; of those as short as the best none
    moves fewer bytes where it is the `fewest`.
    """

    joint: Joint | None
    period: float
    bound: float
    fewest: bool

    @property
    def proven(self) -> bool:
        """Whether the period is the shortest there is, up to 1e-5 of it."""
        return self.period <= self.bound * (1 + 1.1 * CLOSE)


def solvable(judge: Judge) -> bool:
    """Whether it is small enough, and who needs a part takes turns with all beside it."""
    demand, tasks = judge.demand, judge.problem.tasks
    naps = sum(len(held.users) for held in demand.held)
    if len(tasks) > MOST_TASKS or naps > MOST_NAPS:
        return False
    return all(
        user == other or tasks[user].resources & tasks[other].resources
        for held in demand.held
        for user in held.users
        for other in {*held.users, *(x for r in held.rings for x in demand.rooms[r].rooms)}
    )


def optimise_jointly(judge: Judge, start: Judged, seconds: float) -> Best:
    """The best that is found in so many seconds, beginning with `start`, and a proven bound.

    Raises UsageError (E230) where ortools is missing.
    """
    end = time.monotonic() + seconds
    hints = timed_kernel(judge.problem, start.kernel).schedule()
    joint, period, moved, low = None, start.period, start.moved, judge.problem.bound
    shortest = True
    while period > low * (1 + 1.1 * CLOSE):
        # In turns what would prove the best to be it, and the middle.
        target = max(period * (1 - CLOSE) if shortest else (low + period) / 2, low)
        shortest = not shortest
        answer, found = JointModel(judge, target, hints).solve(end - time.monotonic())
        if answer is False:
            low = target
        elif found is not None and found.period < period:
            joint, period, moved = found, found.period, found.moved
        else:
            break
    model = JointModel(judge, period * (1 + ROUNDING), hints)
    answer, found = model.solve(end - time.monotonic(), fewest=True)
    if found is not None and found.moved < moved and found.period <= period * (1 + CLOSE):
        joint, moved = found, found.moved
    fewest = bool(answer) and found is not None and moved <= found.moved
    return Best(joint=joint, period=period, bound=min(low, period), fewest=fewest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A part that may leave after a use: offsets from that use's start, and how long copies take.

    `taken` says whether it does, `anew` whether the next use makes it anew; where `costly` is 0
    no bytes move.
    """

    held: int
    user: int
    taken: Any
    anew: Any
    costly: Any
    out: Any
    back: Any
    sleep: Any
    wake: Any


class JointModel:
    """Whether there is a schedule of a period, moves included."""

    def __init__(self, judge: Judge, period: float, hints: Schedule) -> None:
        self.judge = judge
        self.unit = period / UNITS
        self.base = exact.PeriodModel(exact.solver_module(), judge.problem, period, hints)
        self.model = self.base.model
        self.problem: Problem = self.base.problem
        self.naps: list[Absence] = []
        self.away: dict[tuple[int, int, int], Any] = {}
        self.laps: dict[tuple[int, int, bool, bool], Any] = {}
        self.inside: dict[tuple[int, int], Any] = {}
        if self.base.starts is None:
            return
        self.starts = self.base.starts
        self.laps_tried = range(-self.base.turns - 2, self.base.turns + 2)
        for number, held in enumerate(judge.demand.held):
            self.naps += [self._nap(number, user) for user in held.users]
        for one, other in combinations(range(len(self.naps)), 2):
            self._take_turns(one, other)
        self._memory_while_actions_run()
        for number, nap in enumerate(self.naps):
            self._memory_while_waking(number)
            away = [x for key, x in self.away.items() if key[:2] == (nap.held, nap.user)]
            self.model.add_bool_or([*away, ~nap.taken])

    def _after(self, user: int, other: int) -> Any:
        """From the start of one action to the next start of another, within a period."""
        if user == other:
            return UNITS
        apart = self.base.apart[user, other]
        # A sum: OR-Tools 9.12 takes a number from an expression of one variable, and no expression.
        return self.starts[other] - self.starts[user] + apart * -UNITS

    def _nap(self, number: int, user: int) -> Absence:
        """Out after a use, back before the next one."""
        held, copies = self.judge.demand.held[number], self.judge.copies[number]
        name = f"{number} {user}"
        anew = self._anew(number, user)
        taken = self.model.new_bool_var(f"nap {name}")
        costly = self.model.new_bool_var(f"moves {name}")
        self.model.add(costly >= taken - anew)
        out = self.model.new_int_var(0, UNITS, f"out {name}")
        back = self.model.new_int_var(0, UNITS, f"back {name}")
        lasts = {key: self._units(seconds) for key, seconds in copies.items()}
        sleep, wake = (
            lasts["offload", w] + (lasts["discard", w] - lasts["offload", w]) * anew
            for w in (False, True)
        )
        self.model.add(out >= int(self.problem.seconds[user]))
        self.model.add(back >= out + sleep).only_enforce_if(taken)
        self.model.add(back + wake <= UNITS).only_enforce_if(taken)
        for other in held.users:
            if other != user:
                before = back + wake <= self._after(user, other)
                self.model.add(before).only_enforce_if(taken)
        return Absence(
            held=number,
            user=user,
            taken=taken,
            anew=anew,
            costly=costly,
            out=out,
            back=back,
            sleep=sleep,
            wake=wake,
        )

    def _anew(self, number: int, user: int) -> Any:
        """1 where the next one to use a part makes it anew."""
        held = self.judge.demand.held[number]
        if held.makers >= set(held.users) or not held.makers:
            return int(bool(held.makers))
        others = [other for other in held.users if other != user] or [user]
        follows = {o: self.model.new_bool_var(f"{number} {user} then {o}") for o in others}
        self.model.add_exactly_one(follows.values())
        apart = self.base.apart
        for one, chosen in follows.items():
            for other in others:
                if other != one:
                    turns = apart[user, other] - apart[user, one] - apart[one, other]
                    self.model.add(turns == 0).only_enforce_if(chosen)
        return sum(chosen for one, chosen in follows.items() if one in held.makers)

    def _move(self, nap: Absence, *, wake: bool) -> tuple[Any, Any]:
        """When a move starts, and how long it takes."""
        offset, lasts = (nap.back, nap.wake) if wake else (nap.out, nap.sleep)
        return self.starts[nap.user] + offset, lasts

    def _take_turns(self, first: int, second: int) -> None:
        """No move of one nap beside a move of another on a lane of both."""
        one, other = self.naps[first], self.naps[second]
        held = self.judge.demand.held
        if one.held == other.held or not {*held[one.held].rings} & {*held[other.held].rings}:
            return
        both = [one.taken, other.taken]
        for a in (False, True):
            for b in (False, True):
                (start, lasts), (then, long) = self._move(one, wake=a), self._move(other, wake=b)
                choices = {k: self.model.new_bool_var(f"lap {k}") for k in self.laps_tried}
                self.model.add_exactly_one(choices.values())
                for k, chosen in choices.items():
                    apart, every = then - start - UNITS * k, [*both, chosen]
                    self.model.add(apart >= lasts).only_enforce_if(every)
                    self.model.add(apart <= UNITS - long).only_enforce_if(every)
                lap = sum(k * chosen for k, chosen in choices.items())
                self.laps[first, second, a, b] = lap
                self.laps[second, first, b, a] = -1 - lap

    def _units(self, seconds: float) -> int:
        """Seconds as whole units, at most two periods."""
        return int(min(seconds / self.unit, 2 * UNITS))

    def _memory_while_actions_run(self) -> None:
        """What is not away fits beside every action."""
        held = self.judge.demand.held
        for number, room in enumerate(self.judge.demand.rooms):
            for action, size in room.rooms.items():
                here = [
                    n for n, h in enumerate(held) if number in h.rings and action not in h.users
                ]
                most = sum(held[n].size for n in here)
                if most > size:
                    freed = sum(held[n].size * self._away(n, action) for n in here)
                    self.model.add(freed >= most - size)

    def _away(self, number: int, action: int) -> Any:
        """1 where a part is away while an action runs."""
        found = []
        for nap in (nap for nap in self.naps if nap.held == number):
            key = number, nap.user, action
            if key not in self.away:
                away = self.away[key] = self.model.new_bool_var(f"away {key}")
                begins = self._after(nap.user, action)
                ends = begins + int(self.problem.seconds[action])
                self.model.add_implication(away, nap.taken)
                self.model.add(nap.out + nap.sleep <= begins).only_enforce_if(away)
                self.model.add(ends <= nap.back).only_enforce_if(away)
            found.append(self.away[key])
        self.model.add_at_most_one(found)
        return sum(found)

    def _memory_while_waking(self, number: int) -> None:
        """Where not all parts fit at once, others are away while one comes back."""
        nap, held = self.naps[number], self.judge.demand.held
        for ring in held[nap.held].rings:
            short = -self.judge.demand.rooms[ring].spare
            if short > 0:
                others = [
                    held[other.held].size * self._inside(number, n)
                    for n, other in enumerate(self.naps)
                    if other.held != nap.held and ring in held[other.held].rings
                ]
                self.model.add(sum(others) >= short).only_enforce_if(nap.taken)

    def _inside(self, number: int, other: int) -> Any:
        """1 where a nap's wake lies within another nap."""
        nap, around = self.naps[number], self.naps[other]
        if (number, other) in self.inside:
            return self.inside[number, other]
        inside = self.model.new_bool_var(f"{number} within {other}")
        self.model.add_implication(inside, around.taken)
        turns = self.laps[other, number, False, True] + self.laps[number, other, True, True]
        self.model.add(turns == 0).only_enforce_if([inside, nap.taken])
        self.inside[number, other] = inside
        return inside

    def solve(self, seconds: float, *, fewest: bool = False) -> tuple[bool | None, Joint | None]:
        """Yes with what was found, no, or None where the time was up.

        Where the `fewest` bytes are asked for, yes says that they are.
        """
        if self.base.starts is None:
            return False, None
        if fewest:
            self.model.minimize(self._bytes())
        module = self.base.cp_model
        solver = self.base.solver(seconds)
        # Without a relaxation copies that fill a lane are told apart one unit at a time.
        solver.parameters.linearization_level = 2
        status = solver.solve(self.model)
        if status == module.INFEASIBLE:
            return False, None
        if status not in (module.OPTIMAL, module.FEASIBLE):
            return None, None
        answer = None if fewest and status != module.OPTIMAL else True
        starts = tuple(float(solver.value(start)) for start in self.starts)
        schedule = Schedule(period=float(UNITS), starts=starts)
        return answer, joint_of(self.judge, self.problem, self._answer(solver, schedule))

    def _bytes(self) -> Any:
        """Bytes that move, and of as few bytes the fewer naps."""
        held = self.judge.demand.held
        costs = [(held[nap.held].moved, nap.costly) for nap in self.naps]
        unit = gcd(*(moved for moved, _ in costs)) or 1
        weight = len(self.naps) + 1
        return sum(m // unit * weight * moves for m, moves in costs) + sum(
            nap.taken for nap in self.naps
        )

    def _answer(self, solver: CpSolver, schedule: Schedule) -> Answer:
        """What the solver said of the naps that are taken."""
        taken = [n for n, nap in enumerate(self.naps) if solver.value(nap.taken)]
        place = {nap: at for at, nap in enumerate(taken)}
        within = [
            (place[one], place[other], solver.value(self.laps[other, one, False, True]))
            for (one, other), inside in self.inside.items()
            if one in place and solver.value(inside)
        ]
        naps = tuple(self._slept(solver, self.naps[nap]) for nap in taken)
        return Answer(schedule=schedule, naps=naps, within=tuple(within))

    def _slept(self, solver: CpSolver, nap: Absence) -> Slept:
        """A nap that is taken."""
        users = self.judge.demand.held[nap.held].users
        away = frozenset(
            action
            for (held, user, action), away in self.away.items()
            if (held, user) == (nap.held, nap.user) and solver.value(away)
        )
        turns = {
            x: -1 if x == nap.user else solver.value(self.base.apart[nap.user, x])
            for x in (*users, *sorted(away))
        }
        moves = [
            CopyMove(offset=solver.value(offset), units=solver.value(lasts))
            for offset, lasts in ((nap.out, nap.sleep), (nap.back, nap.wake))
        ]
        return Slept(
            held=nap.held,
            user=nap.user,
            mode="discard" if solver.value(nap.anew) else "offload",
            out=moves[0],
            back=moves[1],
            away=away,
            turns=turns,
        )
