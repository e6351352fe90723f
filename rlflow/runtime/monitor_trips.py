"""What the monitor knows of loops: how far their trips have come, and who is left out for it.

Looks up what a plan says, and nothing that a pass has proven.
"""

from __future__ import annotations

from collections import defaultdict

from rlflow.ops.body import Stat
from rlflow.runtime.executor import Completion
from rlflow.scheduler.plan import Action, Plan, Trip

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
        passed = self.reached[trip.loop, iteration]
        gate = self.gates.get((trip.loop, len(passed)))
        assert len(passed) >= trip.index, f"{name} starts before {gate}@{iteration} is over"
        before = passed[: trip.index]
        assert all(value < trip.goal for value in before), f"{name} starts, its loop is over"

    def _trip(self, action: str) -> Trip | None:
        return self.actions[action].trip if action in self.actions else None

    def left_out(self, action: str, iteration: int) -> bool:
        """Whether an action is of a trip that its loop did not need."""
        trip = self._trip(action)
        passed = self.reached[trip.loop, iteration][: trip.index] if trip else []
        return any(value >= trip.goal for value in passed if trip)

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
        later = (a for a in self.actions.values() if a.trip and a.trip.loop == gate.loop)
        return [a.id for a in later if a.trip and a.trip.index > gate.index]

    def logged_as(self, action: Action) -> str:
        """The name that its numbers have, those of all trips together."""
        name = action.node or action.id
        return name.partition("#")[0] if action.id in self.actions else name
