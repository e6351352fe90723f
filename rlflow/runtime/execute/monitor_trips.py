"""What the monitor knows of loops: how far their trips have come, and who is left out for it.

Looks up what a plan says, and nothing that a pass has proven.
"""

from __future__ import annotations

from collections import defaultdict

from rlflow.contract.values import Stat
from rlflow.runtime.execute.executor import Completion
from rlflow.scheduler.plan.plan import Action, Plan, Trip

Instance = tuple[str, int]


class Trips:
    """What trips of loops have reached by (loop, iteration), and who is left out for it.

    A gate adds to what trips up to its own have reached; with the goal, later ones are left out.
    """

    def __init__(self, plan: Plan) -> None:
        found = [action for action in plan.actions if action.trip is not None]
        self.actions = {action.id: action for action in found}
        self.gates = {(a.trip.loop, a.trip.index): a.id for a in found if a.trip and a.trip.gate}
        self.reached: dict[Instance, list[float]] = defaultdict(list)

    def start(self, action: Action, iteration: int, name: str) -> None:
        """Check that every gate before has been passed, and that none has ended the loop."""
        if (trip := self._trip(action.id)) is None:
            return
        for level in trip.levels:
            passed = self.reached[level.loop, iteration]
            gate = self.gates.get((level.loop, len(passed)))
            assert len(passed) >= level.index, f"{name} starts before {gate}@{iteration} is over"
            before = passed[: level.index]
            assert all(value < level.goal for value in before), f"{name} starts, its loop is over"

    def _trip(self, action: str) -> Trip | None:
        return self.actions[action].trip if action in self.actions else None

    def left_out(self, action: str, iteration: int) -> bool:
        """Whether an action is of a trip that its loop did not need."""
        trip = self._trip(action)
        return any(
            value >= level.goal
            for level in (trip.levels if trip else ())
            for value in self.reached[level.loop, iteration][: level.index]
        )

    def finish(self, action: Action, completion: Completion) -> list[str]:
        """Book what a gate has counted; returns those that are left out for it."""
        gate = self._trip(action.id)
        if gate is None or not gate.gate:
            return []
        passed = self.reached[gate.loop, completion.iteration]
        found = completion.metrics["reached"]
        passed.append(sum(passed[-1:]) + (found.value if isinstance(found, Stat) else found))
        if passed[-1] < gate.goal:
            return []
        over = {gate.loop: gate.index}
        return [a.id for a in self.actions.values() if a.trip and a.trip.is_over(over)]
