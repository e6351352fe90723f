"""A segment: the iterations between two checkpoints, and how many turns each action has made in it.

A segment says what is due in a turn, for which iteration, and what it waits for. It starts
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.scheduler.plan.plan import Action, Plan

AHEAD = 2


@dataclass(slots=True)
class Segment:
    """Iterations `start` to `end` between two checkpoints, and how far its turns have come.

    `first` is its first turn, and `turns[action]` the next turn of each action. `opening` are the
    reshards that bring version `start` to instances that lack it. `refilled` are the reshards whose
    targets are discarded in every turn, so that they run in every turn. In a `closing` segment only
    closing runs are due. `serving` has the iteration that each sleep or wake serves, relative to
    its turn.
    """

    start: int
    end: int
    first: int
    opening: frozenset[str]
    refilled: frozenset[str]
    closing: bool
    turns: dict[str, int]
    serving: Mapping[str, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    whole: int = 0

    def due(self, action: Action) -> bool:
        """Whether the next turn of an action does something; sleeps and wakes do in every one.

        The first turn of a segment with an opening has the opening only; it precedes all others.
        """
        if action.part is not None:
            return True
        turn = self.turns[action.id]
        iteration = turn + action.ahead
        if action.id in self.opening and turn == self.first:
            return True
        within = self.start <= iteration < self.end
        if action.kind == "reshard" and (self.closing or not within):
            return action.id in self.refilled
        if not within:
            return False
        return action.closing if self.closing else action.due(iteration)

    def done_for(self, action: Action) -> int:
        """The iteration that the next turn of an action is done for, where it is due.

        A sleep or wake serves the runs around it, or the nearest iteration of the segment where
        those do nothing. A reshard outside of the segment brings the version with which the segment
        begins or ends.
        """
        iteration = self.turns[action.id] + action.ahead
        if action.part is not None:
            iteration += self.serving.get(action.id, 0)
            return min(max(iteration, self.start), self.end - 1)
        if action.kind == "reshard":
            last = self.start - 1 if self.closing else self.end - 1
            return min(max(iteration, self.start - 1), last)
        return iteration

    def ready(self, action: Action) -> bool:
        """Whether all dependencies of an action's next turn are over."""
        turn = self.turns[action.id]
        if turn >= self.end or turn >= self.whole + AHEAD:
            return False
        return all(
            self.turns[dep.action] > turn - dep.distance or turn - dep.distance < self.first
            for dep in action.after
        )

    def finish(self, name: str) -> bool:
        """Count a turn of an action as over; true if every action has now finished a turn."""
        turn = self.turns[name]
        self.turns[name] = turn + 1
        self.left[turn] = self.left.get(turn, len(self.turns)) - 1
        before = self.whole
        while self.left.get(self.whole) == 0:
            del self.left[self.whole]
            self.whole += 1
        return self.whole > before


def closing_actions(plan: Plan) -> frozenset[str]:
    """The closing actions, and the reshards that fill what they read."""
    read = {name for action in plan.actions if action.closing for name, _ in action.reads}
    return frozenset(
        action.id for action in plan.actions if action.closing or read.intersection(action.targets)
    )
