"""Which trip through a loop a node is of, how likely that runs, and which gate it comes after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.scheduler import keys
from rlflow.scheduler.costs import Costs
from rlflow.scheduler.plan import Trip

Made = tuple[str, str]


def recarried(node: Node, moved: Mapping[Made, Made]) -> Node:
    """The node that ends a loop, whose state begins or goes on where others make its fields."""
    carried = dict(node.params).get("carried", ())
    pairs = [((first, field), (source, made)) for first, field, source, made in carried]
    after = tuple((*moved.get(one, one), *moved.get(other, other)) for one, other in pairs)
    if after == carried:
        return node
    params = tuple((key, after if key == "carried" else value) for key, value in node.params)
    return replace(node, params=params)


def keeps_surplus(graph: Graph, loop: str | None = None) -> bool:
    """Whether a loop, or any at all, leaves rows over for the next iteration."""
    ends = (node for node in graph.nodes if node.ends_loop and loop in (None, node.name))
    return any(dict(node.params).get("surplus") == "keep" for node in ends)


def expected_trips(end: Node, graph: Graph, costs: Costs) -> tuple[float, str]:
    """How many trips a loop takes on average, from 1 to the most, and where that is from.

    What the user expects goes first, then what earlier runs took, then what `end` assumes.
    """
    params = dict(end.params)
    if "assumed" not in params:
        return float(params["expected"]), "expected"
    record = costs.cluster.measured.find(keys.trips(graph, end), costs.setting)
    if record is None:
        return float(params["expected"]), "assumed"
    runs, most = len(record.chosen), float(params["at_most"])
    by = "profile" if record.source == "profile" else f"{runs} run{'s' if runs > 1 else ''}"
    return min(max(record.trips, 1.0), most), f"measured in {by}"


def trip_of(node: Node, graph: Graph, costs: Costs) -> tuple[Trip | None, float]:
    """Which trip a node is of, and with what chance that runs."""
    if node.trip is None or node.loop is None:
        return None, 1.0
    index, count = node.trip
    ends = graph.node(node.loop)
    gate = node.is_gate
    trip = Trip(
        loop=node.loop,
        index=index,
        of=count,
        gate=gate,
        goal=float(dict(ends.params).get("batch", 1)),
    )
    expected, _ = expected_trips(ends, graph, costs)
    return trip, min(max(expected - index, 0.0), 1.0)


def gate_before(node: Node, graph: Graph) -> str | None:
    """The gate that a node of a later trip comes after."""
    if node.trip is None or node.trip[0] == 0:
        return None
    for other in graph.nodes:
        ends = other.is_gate and other.loop == node.loop
        if ends and other.trip is not None and other.trip[0] == node.trip[0] - 1:
            return other.name
    raise AssertionError(f"no gate ends the trip before {node.name}")
