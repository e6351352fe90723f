"""A plan on a virtual clock: when every action instance starts and ends, and what it waited for.

An instance starts when all that it comes after is over and its devices are free; of several
that are ready the one listed first goes first, an earlier turn before a later one. Turns,
segments, phantoms and the number of turns under way are those of the executor. Plain Python;
this file adds nothing up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.plan.turns import Seconds, estimated, refilled, serving

TURNS_UNDER_WAY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One action instance as it was played; `start` and `end` in seconds.

    `released` is the place, in the list of all that was played, of the instance whose end let
    this one start; None where nothing did.
    """

    action: Action
    iteration: int
    turn: int
    start: float
    end: float
    released: int | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def play(
    plan: Plan,
    iterations: int,
    *,
    seconds: Seconds = estimated,
    barrier: int | None = None,
    window: int = TURNS_UNDER_WAY,
) -> list[Played]:
    """The instances of iterations 0 to `iterations`, in the order of their starts.

    After every `barrier` iterations all is over before more starts. No action is `window` turns
    in front of the first unfinished one. ValueError for a plan whose distances are not of turns
    yet, or in which actions wait for each other for ever.
    """
    if any(dep.distance < 0 for action in plan.actions for dep in action.after):
        raise ValueError("pass `order` has not run: a distance is below 0")
    played: list[Played] = []
    table = _Table(plan)
    first, clock = 0, 0.0
    while first < iterations:
        last = min(first + (barrier or iterations), iterations)
        clock = _Segment(table, first, last, window, seconds, played).run(clock)
        first = last
    return played


class _Table:
    """What is the same in all segments of a plan, by the actions' places in its list.

    Devices that run the same actions are one resource, as are the two lanes of each apart.
    """

    def __init__(self, plan: Plan) -> None:
        self.actions = plan.actions
        place = {action.id: index for index, action in enumerate(plan.actions)}
        self.most = max((action.ahead for action in plan.actions), default=0)
        self.refilled = refilled(plan)
        self.serving = serving(plan)
        self.deps: list[list[tuple[int, int]]] = []
        self.followers: list[list[tuple[int, int]]] = [[] for _ in plan.actions]
        for index, action in enumerate(plan.actions):
            pairs = {(place[dep.action], dep.distance) for dep in action.after} | {(index, 1)}
            self.deps.append(sorted(pairs))
            for other, distance in self.deps[-1]:
                self.followers[other].append((index, distance))
        users: dict[tuple[int, str], list[int]] = {}
        for index, action in enumerate(plan.actions):
            for device in action.devices:
                users.setdefault((device, action.lane), []).append(index)
        self.resources: list[list[int]] = [[] for _ in plan.actions]
        groups = dict.fromkeys(tuple(group) for group in users.values())
        for number, group in enumerate(groups):
            for index in group:
                self.resources[index].append(number)
        self.num_resources = len(groups)


class _Segment:
    """Iterations `first` to `last` being played; an instance is turn * actions + place."""

    def __init__(
        self,
        table: _Table,
        first: int,
        last: int,
        window: int,
        seconds: Seconds,
        played: list[Played],
    ) -> None:
        self.table, self.first, self.last = table, first, last
        self.window, self.seconds, self.played = window, seconds, played
        self.count = len(table.actions)
        self.begin = first - table.most
        self.turns = last - self.begin
        self.waiting = [
            sum(distance <= turn for _, distance in deps) + (turn >= window)
            for turn in range(self.turns)
            for deps in table.deps
        ]
        self.left = [self.count] * self.turns
        self.cause: dict[int, int | None] = {}
        self.ready: list[int] = []
        self.running: list[tuple[float, int, int]] = []
        self.busy = [False] * table.num_resources
        self.holder: list[int | None] = [None] * table.num_resources
        self.ready_at: dict[int, float] = {}

    def run(self, now: float) -> float:
        """Play it from a moment on; returns the moment at which all is over."""
        self._release([i for i, count in enumerate(self.waiting) if count == 0], now, None)
        while self.ready or self.running:
            self._dispatch(now)
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                _, instance, number = heapq.heappop(self.running)
                for resource in self.table.resources[instance % self.count]:
                    self.busy[resource] = False
                    self.holder[resource] = number
                self._release(self._over(instance), now, number)
        if any(self.left):
            raise ValueError("actions of the plan wait for each other")
        return now

    def _dispatch(self, now: float) -> None:
        """Start, in the order of the list, what is ready and finds its devices free."""
        blocked = []
        while self.ready:
            instance = heapq.heappop(self.ready)
            resources = self.table.resources[instance % self.count]
            if any(self.busy[resource] for resource in resources):
                blocked.append(instance)
                continue
            cause = self.cause[instance]
            if self.ready_at[instance] < now:
                holders = (self.holder[resource] for resource in resources)
                cause = max(
                    (number for number in holders if number is not None),
                    key=lambda number: (self.played[number].end, -number),
                )
            self._start(instance, now, cause)
        self.ready = blocked

    def _start(self, instance: int, now: float, cause: int | None) -> None:
        turn, place = divmod(instance, self.count)
        action = self.table.actions[place]
        iteration = self._iteration(turn, action)
        end = now + self.seconds(action, iteration)
        for resource in self.table.resources[place]:
            self.busy[resource] = True
        heapq.heappush(self.running, (end, instance, len(self.played)))
        self.played.append(
            Played(
                action=action,
                iteration=iteration,
                turn=turn + self.begin,
                start=now,
                end=end,
                released=cause,
            )
        )

    def _iteration(self, turn: int, action: Action) -> int:
        """The iteration of an instance; a sleep, wake or reshard has one near the segment's."""
        iteration = turn + self.begin + action.ahead
        if action.part is not None:
            iteration += self.table.serving.get(action.id, 0)
            return min(max(iteration, self.first), self.last - 1)
        if action.kind == "reshard":
            return min(max(iteration, self.first - 1), self.last - 1)
        return iteration

    def _is_phantom(self, turn: int, action: Action) -> bool:
        """Whether it does nothing; what is emptied in every turn is filled in every turn too."""
        iteration = turn + self.begin + action.ahead
        if action.part is not None:
            return False
        if self.first <= iteration < self.last:
            return not action.due(iteration)
        return action.id not in self.table.refilled

    def _release(self, instances: list[int], now: float, cause: int | None) -> None:
        """Make instances ready that wait for nothing more; phantoms are over, and so on."""
        while instances:
            instance = instances.pop()
            turn, place = divmod(instance, self.count)
            if self._is_phantom(turn, self.table.actions[place]):
                instances += self._over(instance)
            else:
                self.cause[instance] = cause
                self.ready_at[instance] = now
                heapq.heappush(self.ready, instance)

    def _over(self, instance: int) -> list[int]:
        """Count an instance as over; returns those that wait for nothing more."""
        turn, place = divmod(instance, self.count)
        freed = [
            (turn + distance) * self.count + other
            for other, distance in self.table.followers[place]
            if turn + distance < self.turns
        ]
        self.left[turn] -= 1
        if self.left[turn] == 0 and turn + self.window < self.turns:
            later = (turn + self.window) * self.count
            freed += range(later, later + self.count)
        for follower in freed:
            self.waiting[follower] -= 1
        return [follower for follower in dict.fromkeys(freed) if self.waiting[follower] == 0]
