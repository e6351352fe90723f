"""Happens-before: the transitive closure of what actions come `after`, over unrolled turns.

An instance is (action, turn). Where b comes after a at a distance of d turns, instance (a, t) is
over before (b, t + d) starts; the closure of that is what holds in every interleaving, as nothing
else orders a run: that lanes take turns is for a rule to prove. An instance that is not due, that
its loop leaves out, or that is none of the run's starts nothing, and is over when all that it
comes after is over: it hands on the order like any other.

A window of turns is enough. No distance is below 0, so what leads from (a, t) to (b, t + k) lies
within turns t to t + k: for k below `turns` the closure is exact, and the same for every t. Where
rules ask further than that, nothing is proven, which refuses a plan and never accepts one.

A set of instances is one int: action number i of turn t has bit t * actions + i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """Actions by their numbers, and the instances of a window of `turns` turns.

    `waits` has for each action (other, turns) it comes after; `order` has each action once, after
    all that it waits for in its own turn. Actions on a cycle are not in it, and precede nothing.
    """

    waits: Sequence[Sequence[tuple[int, int]]]
    order: Sequence[int]
    turns: int

    @cached_property
    def past(self) -> list[list[int]]:
        """For every turn and action: the instances that are over before that instance starts."""
        count = len(self.waits)
        sets: list[list[int]] = []
        over: list[list[int]] = []
        for turn in range(self.turns):
            sets.append([0] * count)
            over.append([0] * count)
            for number in self.order:
                found = 0
                for other, distance in self.waits[number]:
                    if distance <= turn:
                        found |= over[turn - distance][other]
                sets[turn][number] = found
                over[turn][number] = found | 1 << (turn * count + number)
        return sets

    @cached_property
    def future(self) -> list[int]:
        """For every action of turn 0: the instances that start only when it is over."""
        count, most = len(self.waits), self.turns - 1
        followers: list[list[tuple[int, int]]] = [[] for _ in self.waits]
        for number in self.order:
            for other, distance in self.waits[number]:
                followers[other].append((number, distance))
        found = [0] * count
        begun: list[list[int]] = [[0] * count for _ in range(self.turns)]
        for turn in range(most, -1, -1):
            found = [0] * count
            for number in reversed(self.order):
                later = 0
                for other, distance in followers[number]:
                    if turn + distance <= most:
                        later |= begun[turn + distance][other]
                found[number] = later
                begun[turn][number] = later | 1 << (turn * count + number)
        return found

    def precedes(self, first: int, second: int, turns: int) -> bool:
        """Whether `first` of a turn is over before `second` starts so many turns later."""
        return 0 <= turns < self.turns and bool(self.past[turns][second] >> first & 1)

    def every_turn(self, numbers: Iterable[int]) -> int:
        """The instances of some actions in all turns of the window."""
        count, once = len(self.waits), 0
        for number in numbers:
            once |= 1 << number
        found = 0
        for turn in range(self.turns):
            found |= once << turn * count
        return found

    def over(self, number: int, instances: int) -> int:
        """How many of some instances are proven over before the last turn's of an action starts."""
        return (self.past[-1][number] & instances).bit_count()

    def begins_later(self, number: int, instances: int) -> int:
        """How many of some instances are proven to start after the first turn's of an action."""
        return (self.future[number] & instances).bit_count()
