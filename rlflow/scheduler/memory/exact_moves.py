"""From the starts of a solver to an order with its moves: what is away when, and in which places.

Moves become tasks of their own on lanes for copies; the kernel of all tasks is the order of the
actions and the places of the moves in it. Naps that nothing needs are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.scheduler.memory.demand import Demand
from rlflow.scheduler.memory.judge import Judge
from rlflow.scheduler.periodic.problem import (
    Kernel,
    Precedence,
    Problem,
    Schedule,
    Task,
    kernel_of,
    settled,
    timed_kernel,
)
from rlflow.scheduler.plan.plan import Mode

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyMove:
    """A copy: its offset from the use before it, and how long it takes, in the solver's units."""

    offset: int
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slept:
    """A part that leaves after a use, is away while some actions run, and comes back.

    `turns` are the whole periods by which those, and who uses it next, follow that use.
    """

    held: int
    user: int
    mode: Mode
    out: CopyMove
    back: CopyMove
    away: frozenset[int]
    turns: dict[int, int]

    @property
    def key(self) -> Key:
        """The gap through which it is away: the part, and the use before."""
        return self.held, self.user


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A move in a list: just before the action at place `slot`, after the last at the end."""

    key: Key
    wake: bool
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """An order with its moves: seconds of a turn, bytes that move, and what is away during what.

    Gaps are known by the part and the use before it; `moves` are in the order of the list.
    """

    kernel: Kernel
    period: float
    moved: int
    away: dict[Key, frozenset[int]]
    moves: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a solver said: starts in whole units, the naps, and which wakes lie within others.

    A wake of nap `within`[0] within nap [1], so many whole periods [2] after that one's sleep.
    """

    schedule: Schedule
    naps: tuple[Slept, ...]
    within: tuple[tuple[int, int, int], ...]


def joint_of(judge: Judge, rounded: Problem, answer: Answer) -> Joint:
    """What a solver said as an order with moves, which takes as long but for rounding."""
    demand, naps = judge.demand, answer.naps
    first = len(rounded.tasks)
    edges, every = _with_moves(rounded, answer)
    tasks: list[Task] = []
    copies: list[Task] = []
    for nap in naps:
        lanes = frozenset((ring, "copy") for ring in demand.held[nap.held].rings)
        for wake, move in ((False, nap.out), (True, nap.back)):
            real = judge.copies[nap.held][nap.mode, wake]
            tasks.append(Task(name=f"{nap.key} {wake}", seconds=float(move.units), resources=lanes))
            copies.append(replace(tasks[-1], seconds=real))
    kernel = kernel_of(Problem(tasks=(*rounded.tasks, *tasks), edges=edges), every)
    real_problem = Problem(tasks=(*judge.problem.tasks, *copies), edges=edges)
    order = tuple(task for task in kernel.order if task < first)
    moves = _moves(kernel, naps, first)
    away = {nap.key: nap.away for nap in naps}
    needed = _needed(demand, order, away, moves)
    offloads = {nap.key for nap in naps if nap.mode == "offload"} & needed
    return Joint(
        kernel=Kernel(order=order, ahead=kernel.ahead[:first]),
        period=timed_kernel(real_problem, kernel).period,
        moved=sum(demand.held[held].moved for held, _ in offloads),
        away={key: away[key] for key in needed},
        moves=tuple(move for move in moves if move.key in needed),
    )


def _with_moves(rounded: Problem, answer: Answer) -> tuple[tuple[Precedence, ...], Schedule]:
    """The edges with those of the moves, and when all start so that edges between parts hold.

    What no cycle joins may have been said whole periods too early.
    """
    period, said = answer.schedule.period, answer.schedule.starts
    whole = settled(rounded, answer.schedule)
    later = [round((a - b) / period) for a, b in zip(whole.starts, said, strict=True)]
    starts = [start + turns * period for start, turns in zip(said, later, strict=True)]
    edges, first = list(rounded.edges), len(said)
    for number, nap in enumerate(answer.naps):
        out, back = first + 2 * number, first + 2 * number + 1
        starts += [starts[nap.user] + move.offset for move in (nap.out, nap.back)]
        edges += [Precedence(nap.user, out, 0), Precedence(out, back, 0)]
        for action, turns in nap.turns.items():
            apart = turns + later[action] - later[nap.user]
            if action in nap.away:
                edges += [Precedence(out, action, -apart), Precedence(action, back, apart)]
            else:
                edges.append(Precedence(back, action, -apart))
    for one, around, turns in answer.within:
        wake, out = first + 2 * one + 1, first + 2 * around
        apart = turns + later[answer.naps[one].user] - later[answer.naps[around].user]
        edges += [Precedence(out, wake, -apart), Precedence(wake, out + 1, apart)]
    return tuple(edges), Schedule(period=period, starts=tuple(starts))


def _moves(kernel: Kernel, naps: Sequence[Slept], first: int) -> list[Placed]:
    """The places of moves among the actions, in the order of the list."""
    found, slot = [], 0
    for task in kernel.order:
        if task < first:
            slot += 1
        else:
            nap, wake = divmod(task - first, 2)
            found.append(Placed(key=naps[nap].key, wake=bool(wake), slot=slot))
    return found


def _needed(
    demand: Demand,
    order: Sequence[int],
    away: dict[Key, frozenset[int]],
    moves: Sequence[Placed],
) -> set[Key]:
    """The naps without which something would not fit; those that cost more are left out first."""
    kept = set(away)
    for key in sorted(away, key=lambda key: (-demand.held[key[0]].moved, key)):
        if _fits(demand, order, {k: away[k] for k in kept if k != key}, moves):
            kept.discard(key)
    return kept


def _fits(
    demand: Demand,
    order: Sequence[int],
    away: dict[Key, frozenset[int]],
    moves: Sequence[Placed],
) -> bool:
    """Whether all fits with these naps, while actions run and while parts come back."""
    gone: dict[tuple[bool, int], list[int]] = {}
    for (held, _), during in away.items():
        for action in during:
            gone.setdefault((False, action), []).append(held)
    own = [(at, move) for at, move in enumerate(moves) if move.key in away]
    spots = {(move.key, move.wake): at for at, move in own}
    for at, move in own:
        if move.wake:
            inside = [
                key[0]
                for key in away
                if key[0] != move.key[0]
                and 0
                < (at - spots[key, False]) % len(moves)
                < (spots[key, True] - spots[key, False]) % len(moves)
            ]
            gone[True, at] = inside
    for number, room in enumerate(demand.rooms):
        here = {n: h for n, h in enumerate(demand.held) if number in h.rings}
        for action, size in room.rooms.items():
            others = sum(h.size for h in here.values() if action not in h.users)
            asleep = sum(here[n].size for n in gone.get((False, action), ()) if n in here)
            if others - asleep > size:
                return False
        for at, move in own:
            if move.wake and move.key[0] in here:
                asleep = sum(here[n].size for n in gone[True, at] if n in here)
                if room.spare + asleep < 0:
                    return False
    return True
