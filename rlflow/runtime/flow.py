"""Who reads what an action leaves behind: look-ups that follow from a plan alone.

This file knows neither tensors nor processes.
"""

from __future__ import annotations

from rlflow.scheduler.plan import Action, Plan


class Flow:
    """For every run the actions that deliver its inputs, and for every action its readers."""

    def __init__(self, plan: Plan) -> None:
        brought = {(a.node, a.makes): a.id for a in plan.actions if a.kind == "transfer"}
        runs = {a.node: a.id for a in plan.actions if a.kind == "run"}
        self._sources: dict[str, dict[str, str]] = {}
        self._readers: dict[str, list[Action]] = {action.id: [] for action in plan.actions}
        for action in plan.actions:
            if action.kind == "transfer":
                self._sources[action.id] = {str(action.node): runs[action.node]}
            elif action.kind == "run":
                self._sources[action.id] = {
                    source: brought.get((source, action.takes)) or runs[source]
                    for source in plan.graph.node(str(action.node)).sources
                }
            for source in set(self._sources.get(action.id, {}).values()):
                self._readers[source].append(action)

    def source(self, action: str, node: str) -> str:
        """The action that brings a node's rows to where `action` reads them."""
        return self._sources[action][node]

    def sources(self, action: str) -> tuple[str, ...]:
        """The actions whose rows an action reads, each once."""
        return tuple(dict.fromkeys(self._sources.get(action, {}).values()))

    def readers(self, action: str, iteration: int) -> int:
        """How many actions read in an iteration what `action` left."""
        return sum(reader.due(iteration) for reader in self._readers[action])
