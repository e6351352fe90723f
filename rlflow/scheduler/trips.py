"""Which trip through a loop a node is of, and which gate it comes after: look-ups of a graph."""

from __future__ import annotations

from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.plan import Trip


def keeps_surplus(graph: Graph) -> bool:
    """Whether some loop leaves rows over for the next iteration."""
    return any(dict(node.params).get("surplus") == "keep" for node in graph.nodes)


def trip_of(node: Node, graph: Graph) -> tuple[Trip | None, float]:
    """Which trip a node is of, and with what chance that runs."""
    if node.trip is None or node.loop is None:
        return None, 1.0
    index, count = node.trip
    end = dict(graph.node(node.loop).params)
    gate = "goal" in dict(node.params)
    trip = Trip(
        loop=node.loop,
        index=index,
        of=count,
        gate=gate,
        goal=float(end.get("batch", 1)),
    )
    return trip, min(max(float(end["expected"]) - index, 0.0), 1.0)


def gate_before(node: Node, graph: Graph) -> str | None:
    """The gate that a node of a later trip comes after."""
    if node.trip is None or node.trip[0] == 0:
        return None
    for other in graph.nodes:
        ends = "goal" in dict(other.params) and other.loop == node.loop
        if ends and other.trip is not None and other.trip[0] == node.trip[0] - 1:
            return other.name
    raise AssertionError(f"no gate ends the trip before {node.name}")
