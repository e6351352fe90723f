"""Which trip through a loop a node is of, how likely that runs, and which gate it comes after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import LoopEnd
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.plan.plan import Trip

Made = tuple[str, str]


def recarried(node: Node, moved: Mapping[Made, Made]) -> Node:
    """The node that ends a loop, whose state begins or goes on where others make its fields."""
    end = node.role(LoopEnd)
    if end is None:
        return node
    pairs = [((first, field), (source, made)) for first, field, source, made in end.carried]
    after = tuple((*moved.get(one, one), *moved.get(other, other)) for one, other in pairs)
    return node if after == end.carried else node.being(replace(end, carried=after))


def expected_trips(end: Node, graph: Graph, costs: Costs) -> tuple[float, str]:
    """How many trips a loop takes on average, from 1 to the most, and where that is from.

    What the user expects goes first, then what earlier runs took, then what `end` assumes.
    """
    loop = end.as_a(LoopEnd)
    if not loop.assumed:
        return float(loop.expected), "expected"
    record = costs.cluster.measured.find(keys.trips(graph, end), costs.setting)
    if record is None:
        return float(loop.expected), "assumed"
    runs, most = len(record.chosen), float(loop.at_most)
    by = "profile" if record.source == "profile" else f"{runs} run{'s' if runs > 1 else ''}"
    return min(max(record.trips, 1.0), most), f"measured in {by}"


def trip_of(node: Node, graph: Graph, costs: Costs) -> tuple[Trip | None, float]:
    """Which trip a node is of, and with what chance that runs: that of all loops around it."""
    if node.trip is None or node.loop is None:
        return None, 1.0
    index, count = node.trip
    ends = graph.node(node.loop)
    within, chance = trip_of(ends, graph, costs)
    trip = Trip(
        loop=node.loop,
        index=index,
        of=count,
        gate=node.is_gate,
        goal=ends.as_a(LoopEnd).goal,
        within=within,
    )
    expected, _ = expected_trips(ends, graph, costs)
    return trip, chance * min(max(expected - index, 0.0), 1.0)


def gate_before(node: Node, graph: Graph) -> str | None:
    """The gate that a node of a later trip comes after: of the innermost loop that has one.

    The first trip of a loop within a loop comes after the trip before of that.
    """
    for level in (node, *graph.loops_of(node)):
        if level.trip is None or level.trip[0] == 0:
            continue
        for other in graph.nodes:
            ends = other.is_gate and other.loop == level.loop
            if ends and other.trip is not None and other.trip[0] == level.trip[0] - 1:
                return other.name
        raise AssertionError(f"no gate ends the trip before {node.name}")
    return None
