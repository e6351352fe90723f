"""What nodes keep from call to call: a few numbers each, by node, part of every checkpoint.

A node's body reads and changes its own (`Call.state`); whoever runs a part of a node holds the
same numbers. This file does not know what a number means. Beside them a process keeps how its
engines cut micro-batches, where that is not as planned any more: a run that goes on sums alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rlflow.errors import Finding, RunError

if TYPE_CHECKING:
    from rlflow.contract.engines import Trainer
    from rlflow.runtime.record.durable import JSON
    from rlflow.runtime.worker.loaded import Loaded

States = dict[str, dict[str, float]]
SAVED = "nodes"
# How entries of engines begin; a node's name has no space.
CUT = "micro-batches of "


class NodeStates:
    """The states of one process: of the nodes that it runs, and those of a checkpoint.

    `engines` are what it trains and scores with, by instance and device.
    """

    def __init__(self) -> None:
        self.used: States = {}
        self.loaded: States = {}
        self.engines: dict[str, Trainer] = {}

    def of(self, node: str) -> dict[str, float]:
        """What a node keeps, to be read and changed by its body."""
        return self.used.setdefault(node, dict(self.loaded.get(node, {})))

    def follow(self, loaded: Mapping[str, Loaded], device: int) -> None:
        """Keep the cuts of the engines that this process has, as the rank of a device."""
        trainers = {name: each.train for name, each in loaded.items()}
        self.engines = {f"{n} on {device}": each for n, each in trainers.items() if each}

    def load(self, states: States) -> None:
        """Go back to what a checkpoint holds; a cut is that of an engine planned as it was then."""
        self.used, self.loaded = {}, states
        for name, engine in self.engines.items():
            cut = states.get(f"{CUT}{name}", {})
            same = cut.get("planned") == float(engine.planned_tokens or 0)
            engine.micro_tokens = int(cut["tokens"]) if same else engine.planned_tokens

    def to_save(self) -> States:
        """What a checkpoint is to hold of this process."""
        cuts = {
            f"{CUT}{name}": {
                "tokens": float(engine.micro_tokens),
                "planned": float(engine.planned_tokens or 0),
            }
            for name, engine in self.engines.items()
            if engine.micro_tokens is not None and engine.micro_tokens != engine.planned_tokens
        }
        return self.used | cuts


def to_save(loaded: States, parts: Iterable[States]) -> States:
    """What a checkpoint is to hold: of nodes that nobody has run, what was loaded."""
    return dict(sorted((loaded | agreed(parts)).items()))


def agreed(parts: Iterable[Mapping[str, Mapping[str, float]]]) -> States:
    """The states that processes hold, joined, nodes without a number left out.

    Raises RunError where two of them hold different numbers of one node.
    """
    found: States = {}
    for part in parts:
        for node, state in part.items():
            if not state:
                continue
            held = found.setdefault(node, dict(state))
            if held != dict(state):
                raise RunError(
                    Finding(
                        code="E260",
                        what=f"processes disagree about what {node} keeps from call to call",
                        got=f"{dict(state)}",
                        expected=f"{held}, as another process has it",
                        fix="report it as a bug; a state follows from sums over all parts",
                    )
                )
    return dict(sorted(found.items()))


def saved_states(state: Mapping[str, JSON]) -> States:
    """The states that a checkpoint holds; none in one of a run without any."""
    nodes = state.get(SAVED, {})
    assert isinstance(nodes, dict)
    found: States = {}
    for node, numbers in nodes.items():
        assert isinstance(numbers, dict)
        found[node] = {n: value for n, value in numbers.items() if isinstance(value, float)}
    return found
