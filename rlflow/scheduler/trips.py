"""Which trip through a loop a node is of, and which gate it comes after: look-ups of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.graph.graph import Graph, Node
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


def trip_of(node: Node, graph: Graph) -> tuple[Trip | None, float]:
    """Which trip a node is of, and with what chance that runs."""
    if node.trip is None or node.loop is None:
        return None, 1.0
    index, count = node.trip
    end = dict(graph.node(node.loop).params)
    gate = node.is_gate
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
        ends = other.is_gate and other.loop == node.loop
        if ends and other.trip is not None and other.trip[0] == node.trip[0] - 1:
            return other.name
    raise AssertionError(f"no gate ends the trip before {node.name}")
