"""Rollouts that pools share out, as they were declared: what their rows are does not depend on it.

With weights that are the newest everywhere all parts of a rollout sample as one of all prompts.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import PartsTogether, Portion


def whole_rollouts(graph: Graph) -> Graph:
    """The graph with every rollout that is shared out in one piece, where that samples the same.

    Itself where rollouts run ahead: parts of a rollout are then of other versions than the whole.
    """
    if graph.staleness:
        return graph
    parts = graph.having(Portion)
    gone = {name for part, _ in parts for name in (part.name, *part.sources)}
    nodes = []
    for node in graph.nodes:
        if node.name not in gone:
            nodes.append(_whole(graph, node) if node.role(PartsTogether) else node)
    return replace(graph, nodes=tuple(nodes))


def _whole(graph: Graph, node: Node) -> Node:
    """The rollout whose parts a node puts together."""
    part = graph.node(node.sources[0])
    prompts = graph.node(part.sources[0]).inputs
    return replace(part.without(Portion), name=node.name, inputs=prompts, rows_of=node.name)
