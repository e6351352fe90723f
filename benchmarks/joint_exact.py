"""The shortest turn that any order and any residency together have, by CP-SAT.

One model of starts, naps and copies, written from what a plan promises and sharing nothing with
the passes, asks whether there is a schedule of a period; shorter ones are asked for until none
is. What fits a period fits every longer one. Times are whole numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ortools.sat.python import cp_model

REACH = 3
APART = 2
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What takes `size` on each of `devices`; `copy` is the time to bring it out, or back."""

    name: str
    size: int
    devices: tuple[int, ...]
    copy: int
    thrown_away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What takes all of `devices` (none: the host's one) for `time`, and memory beside its parts.

    `makes` are parts of which it makes all anew.
    """

    name: str
    time: int
    devices: tuple[int, ...]
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    transient: int = 0
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One iteration: jobs, who waits for whom over how many iterations, parts and budgets."""

    jobs: tuple[Job, ...]
    waits: tuple[tuple[int, int, int], ...]
    parts: tuple[Part, ...]
    budgets: dict[int, int] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The shortest whole period found, the least not excluded, and the fewest bytes of the former.

    Without a proof in time bytes are None.
    """

    period: int
    bound: int
    moved: int | None


@dataclass(slots=True, kw_only=True)
class Nap:
    """A part that may leave after a use: when its two copies start, and whether it does."""

    part: Part
    after: int
    taken: Any
    free: Any
    asleep: Any
    back: Any
    copy: Any


class Model:
    """The whole of it for one turn and a period."""

    def __init__(self, turn: Turn, period: int) -> None:
        self.turn = turn
        self.period = period
        self.model = cp_model.CpModel()
        self.far = REACH * period
        self.starts = [self.model.new_int_var(0, self.far, job.name) for job in turn.jobs]
        self.model.add(self.starts[0] <= self.period)
        for source, target, distance in turn.waits:
            self.model.add(
                self.starts[target]
                >= self.starts[source] + turn.jobs[source].time - distance * self.period
            )
        self.follow: dict[tuple[int, int], list[tuple[int, Any]]] = {}
        for one, other in combinations(range(len(turn.jobs)), 2):
            if lanes(turn.jobs[one]) & lanes(turn.jobs[other]):
                self._take_turns(one, other)
        self.naps = [
            self._nap(part, users, after)
            for part in turn.parts
            if (users := [n for n, job in enumerate(turn.jobs) if part.name in job.needs])
            for after in users
        ]
        for one, other in combinations(self.naps, 2):
            if set(one.part.devices) & set(other.part.devices):
                self._share_lane(one, other)
        self._memory()

    def _periods(self, name: str, enforced: list[Any], reach: int = REACH) -> list[tuple[int, Any]]:
        """One of a few whole numbers of periods, where some literals hold."""
        choices = [(k, self.model.new_bool_var(f"{name} {k}")) for k in range(-reach, reach + 1)]
        one = self.model.add_exactly_one([chosen for _, chosen in choices])
        if enforced:
            one.only_enforce_if(*enforced)
        return choices

    def _take_turns(self, one: int, other: int) -> None:
        """The other starts k periods after the end of one, and before the next one starts."""
        jobs, apart = self.turn.jobs, self.starts[other] - self.starts[one]
        self.follow[one, other] = choices = self._periods(f"{one} {other}", [], APART)
        for k, chosen in choices:
            self.model.add(apart >= k * self.period + jobs[one].time).only_enforce_if(chosen)
            until = (k + 1) * self.period - jobs[other].time
            self.model.add(apart <= until).only_enforce_if(chosen)
        self.follow[other, one] = [(-k - 1, chosen) for k, chosen in choices]

    def _next(self, user: int, other: int) -> Any:
        """The first start of another after one starts, within a period."""
        if user == other:
            return self.starts[user] + self.period
        first = self.model.new_int_var(0, 3 * self.far, f"next {user} {other}")
        for k, chosen in self.follow[user, other]:
            found = self.starts[other] - k * self.period
            self.model.add(first == found).only_enforce_if(chosen)
        return first

    def _nap(self, part: Part, users: list[int], after: int) -> Nap:
        """Out after a use, back before the next one; free where that makes it anew."""
        new, name = self.model, f"{part.name} {after}"
        taken, free = new.new_bool_var(f"nap {name}"), new.new_bool_var(f"free {name}")
        out = new.new_int_var(0, 3 * self.far, f"out {name}")
        asleep = new.new_int_var(0, 3 * self.far, f"asleep {name}")
        back = new.new_int_var(0, 3 * self.far, f"back {name}")
        copy = new.new_int_var(0, part.copy, f"copy {name}")
        new.add(out >= self.starts[after] + self.turn.jobs[after].time)
        new.add(asleep == out + copy)
        new.add(back >= asleep)
        new.add(copy == part.copy).only_enforce_if(~free)
        firsts = {user: self._next(after, user) for user in users}
        for first in firsts.values():
            new.add(back + copy <= first).only_enforce_if(taken)
        makers = [u for u in users if part.name in self.turn.jobs[u].makes]
        anew = []
        for maker in makers:
            due = new.new_bool_var(f"{name} made by {maker}")
            for first in firsts.values():
                new.add(firsts[maker] <= first).only_enforce_if(due)
            anew.append(due)
        if not part.thrown_away:
            new.add_bool_or([*anew, ~free])
        return Nap(
            part=part, after=after, taken=taken, free=free, asleep=asleep, back=back, copy=copy
        )

    def _share_lane(self, one: Nap, other: Nap) -> None:
        """No copy of one beside a copy of the other."""
        for a in (one.asleep - one.copy, one.back):
            for b in (other.asleep - other.copy, other.back):
                busy = [one.taken, other.taken, ~one.free, ~other.free]
                for k, chosen in self._periods("lane", busy):
                    self.model.add(b - a >= k * self.period + one.copy).only_enforce_if(chosen)
                    self.model.add(b - a <= (k + 1) * self.period - other.copy).only_enforce_if(
                        chosen
                    )

    def _covered(self, nap: Nap, start: Any, end: Any) -> Any:
        """Whether a part is asleep from a start to an end, by some whole number of periods."""
        name = f"{nap.part.name} {nap.after} covers"
        covered = self.model.new_bool_var(name)
        self.model.add_implication(covered, nap.taken)
        for k, chosen in self._periods(name, [covered]):
            both = [covered, chosen]
            self.model.add(start + k * self.period >= nap.asleep).only_enforce_if(both)
            self.model.add(end + k * self.period <= nap.back).only_enforce_if(both)
        return covered

    def _memory(self) -> None:
        """Within budget while a job runs, and whenever a part comes back."""
        moments = [
            (job.devices, start, start + job.time, set(job.needs), job.transient, [])
            for job, start in zip(self.turn.jobs, self.starts, strict=True)
        ]
        moments += [
            (nap.part.devices, nap.back, nap.back, {nap.part.name}, 0, [nap.taken])
            for nap in self.naps
        ]
        for devices, start, end, needed, transient, enforced in moments:
            others = [p for p in self.turn.parts if p.name not in needed]
            away = {
                part.name: self._asleep(part, start, end)
                for part in others
                if set(part.devices) & set(devices)
            }
            for device in devices:
                here = [p for p in self.turn.parts if device in p.devices]
                held = [p.size * (1 - away.get(p.name, 0)) for p in here]
                fits = self.model.add(sum(held) + transient <= self.turn.budgets[device])
                if enforced:
                    fits.only_enforce_if(*enforced)

    def _asleep(self, part: Part, start: Any, end: Any) -> Any:
        own = [nap for nap in self.naps if nap.part is part]
        if not own:
            return 0
        asleep = self.model.new_bool_var(f"{part.name} asleep")
        self.model.add_bool_or([*(self._covered(nap, start, end) for nap in own), ~asleep])
        return asleep

    def fits(self, seconds: float) -> bool | None:
        """Whether there is a schedule of the period; None where the time was up."""
        status = solver_of(seconds).solve(self.model)
        if status == cp_model.INFEASIBLE:
            return False
        return True if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    def fewest(self, seconds: float) -> int | None:
        """The fewest bytes that move in a period; None where the time was up before a proof."""
        moved = [2 * n.part.size * len(n.part.devices) * self._costs(n) for n in self.naps]
        self.model.minimize(sum(moved))
        solver = solver_of(seconds)
        status = solver.solve(self.model)
        assert status != cp_model.INFEASIBLE, f"a period of {self.period} was said to fit"
        return round(solver.objective_value) if status == cp_model.OPTIMAL else None

    def _costs(self, nap: Nap) -> Any:
        """1 where bytes of a nap move."""
        moves = self.model.new_bool_var(f"{nap.part.name} {nap.after} moves")
        self.model.add_bool_or([moves, ~nap.taken, nap.free])
        return moves


def lanes(job: Job) -> set[int]:
    """The queues a job stands in: one a device, and one of the host."""
    return {-1} if job.on_host else set(job.devices)


def solver_of(seconds: float) -> Any:
    """A solver of one thread and a fixed seed, with so many seconds."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_time_in_seconds = max(seconds, 0.0)
    return solver


def busiest(turn: Turn) -> int:
    """Time that the jobs of the busiest lane take."""
    every = set().union(*map(lanes, turn.jobs))
    return max(sum(j.time for j in turn.jobs if lane in lanes(j)) for lane in every)


def shortest(turn: Turn, planned: int, seconds: float) -> Answer:
    """The best that order and residency together can do, where a period is known to do.

    First whether the one before it does, and then halving. The fewest bytes have as long again.
    """
    end = time.monotonic() + seconds
    best, low = planned, busiest(turn)
    target = max(best - 1, low)
    while low < best:
        fits = Model(turn, target).fits(end - time.monotonic())
        if fits is None:
            break
        best, low = (target, low) if fits else (best, target + 1)
        target = (low + best) // 2
    moved = Model(turn, best).fewest(seconds)
    return Answer(period=best, bound=low, moved=moved)
