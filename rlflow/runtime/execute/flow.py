"""Who reads what an action leaves behind: look-ups that follow from a plan alone.

This file knows neither tensors nor processes.
"""

from __future__ import annotations

from rlflow.scheduler.plan.plan import Action, Plan, Trip
from rlflow.scheduler.plan.row_layout import sources_of


class Flow:
    """For every run the actions that deliver its inputs, and for every action its readers."""

    def __init__(self, plan: Plan) -> None:
        brought = {(a.node, a.makes, a.chunk): a.id for a in plan.actions if a.kind == "transfer"}
        runs: dict[str, list[Action]] = {}
        for action in plan.actions:
            if action.kind == "run":
                runs.setdefault(str(action.node), []).append(action)
        self._origins: dict[str, dict[str, tuple[str, ...]]] = {}
        self._readers: dict[str, list[Action]] = {action.id: [] for action in plan.actions}
        for action in plan.actions:
            found = self._origins.setdefault(action.id, {})
            if action.kind == "transfer":
                made = sources_of(runs[str(action.node)], action.chunk)
                found[str(action.node)] = tuple(source.id for source in made)
            elif action.kind == "run":
                for node in plan.graph.node(str(action.node)).sources:
                    carried = brought.get((node, action.takes, action.piece_read))
                    made = sources_of(runs[node], action.piece_read)
                    found[node] = (carried,) if carried else tuple(source.id for source in made)
            for source in self.sources(action.id):
                self._readers[source].append(action)
        trips = {action.id: action.trip for action in plan.actions}
        self._outside = {
            action.id: tuple(
                source
                for source in self.sources(action.id)
                if action.trip is not None and not _covers(trips[source], action.trip)
            )
            for action in plan.actions
        }

    def origins(self, action: str, node: str) -> tuple[str, ...]:
        """The actions that deliver a node's rows to `action`, chunk by chunk."""
        return self._origins[action][node]

    def sources(self, action: str) -> tuple[str, ...]:
        """The actions whose rows an action reads, each once."""
        found = self._origins[action].values()
        return tuple(dict.fromkeys(source for sources in found for source in sources))

    def outside(self, action: str) -> tuple[str, ...]:
        """The sources of an action that may run though the action's trip is left out."""
        return self._outside[action]

    def readers(self, action: str, iteration: int) -> int:
        """How many actions read the results of `action` in an iteration."""
        return sum(reader.due(iteration) for reader in self._readers[action])


def _covers(one: Trip | None, other: Trip) -> bool:
    """Whether actions of trip `one` are left out wherever those of `other` are."""
    own = {level.loop: level.index for level in one.levels} if one else {}
    return all(own.get(level.loop, -1) >= level.index for level in other.levels)
