"""Costs that remember what they have been asked: hundreds of plans ask the same.

An answer is that of all equal instances, whatever they are called, on devices that are joined
alike: numbers of devices count within the hosts, and the racks, that they are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TypeVar, cast

from rlflow.graph.graph import Node
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.pieces import WHOLE, Piece
from rlflow.scheduler.costs.ranks.rank_memory import Holds
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.plan.plan import Cost, Instance

T = TypeVar("T")
# What an instance is called, where it lies, and what follows from the rest of it.
BESIDE = ("name", "pool", "devices", "engine_plan")
_layout = attrgetter(*(each.name for each in fields(Instance) if each.name not in BESIDE))
# What the sizes of a model on its ranks depend on.
_sizes = attrgetter(
    *("model", "trained", "fsdp", "tp", "ep", "cp", "pp", "virtual", "stages"),
    *("offload", "options", "drafter", "draft_tokens", "inside"),
)

# What stands for an answer that nobody has asked for; None is one.
UNKNOWN = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts(Costs):
    """Costs that remember their answers.

    Equal nodes have equal costs: each plan makes the trips of its loops anew.
    """

    _answers: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)
    _nodes: dict[str, list[Node]] = field(default_factory=dict, compare=False, repr=False)

    def run(self, node: Node, instance: Instance | None, parts: int, piece: Piece = WHOLE) -> Cost:
        """The cost of running a node once."""
        key = "run", self._asked(node), self._lying(instance), parts, piece
        return self._known(key, lambda: Costs.run(self, node, instance, parts, piece))

    def table(
        self, node: Node, instance: Instance | None, parts: int, piece: Piece = WHOLE
    ) -> Cost:
        """The same by model shape and device table alone."""
        key = "table", self._asked(node), self._lying(instance), parts, piece
        return self._known(key, lambda: Costs.table(self, node, instance, parts, piece))

    def working(self, node: Node, instance: Instance, parts: int) -> Holds:
        """What running a node holds beside the model."""
        key = "working", self._asked(node), self._lying(instance), parts
        return self._known(key, lambda: Costs.working(self, node, instance, parts))

    def tokens(self, node: Node) -> tuple[int, int]:
        """Prompt and response tokens of a row, at their longest."""
        return self._known(("tokens", self._asked(node)), lambda: Costs.tokens(self, node))

    def weights(self, instance: Instance) -> int | None:
        """Bytes of parameters on each device."""
        key = "weights", _sizes(instance), len(instance.devices)
        return self._known(key, lambda: Costs.weights(self, instance))

    def gradients(self, instance: Instance) -> int | None:
        """Bytes of gradients on each device."""
        key = "gradients", _sizes(instance), len(instance.devices)
        return self._known(key, lambda: Costs.gradients(self, instance))

    def moments(self, instance: Instance) -> int | None:
        """Bytes of the optimizer's state on each device."""
        key = "moments", _sizes(instance), len(instance.devices)
        return self._known(key, lambda: Costs.moments(self, instance))

    def resharded(
        self, source: Instance, target: Instance, *, in_place: bool, lent: bool = False
    ) -> int | None:
        """Bytes that a reshard moves."""
        first = min(*source.devices, *target.devices)
        how = {"in_place": in_place, "lent": lent}
        key = "resharded", self._lying(source, first), self._lying(target, first), in_place, lent
        return self._known(key, lambda: Costs.resharded(self, source, target, **how))

    def _known(self, key: Hashable, ask: Callable[[], T]) -> T:
        key = self.stage, key
        found = self._answers.get(key, UNKNOWN)
        if found is UNKNOWN:
            found = self._answers[key] = ask()
        return cast("T", found)

    def _asked(self, node: Node) -> Hashable:
        """What an equal node has been asked under: its name, and which of those of that name.

        And beside what it is planned.
        """
        known = self._nodes.setdefault(node.name, [])
        equal = (n for n, other in enumerate(known) if other is node or other == node)
        place = next(equal, len(known))
        if place == len(known):
            known.append(node)
        return node.name, place, self.backend, self.staleness, self.off

    def _lying(self, instance: Instance | None, first: int | None = None) -> Hashable:
        """An instance and its devices, by numbers from the host of the `first` of some."""
        if instance is None:
            return None
        grain = repeats_after(self.cluster)
        start = instance.devices[0] if first is None else first
        before = start // grain * grain if grain else 0
        devices = instance.devices
        return _layout(instance), tuple(d - before for d in devices) if before else devices


def repeats_after(cluster: Cluster) -> int:
    """After how many devices hosts and links begin as they did at device 0; 0 if they never do."""
    if cluster.groups:
        return 0
    kind = cluster.kind
    return math.lcm(-(-cluster.count // cluster.hosts), kind.per_host, kind.linked or 1)
