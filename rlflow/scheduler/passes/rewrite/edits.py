"""Edits of a plan's graph that rewrites share. This file decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlflow.graph.fields import Field
from rlflow.graph.graph import Node
from rlflow.graph.roles import Scoring
from rlflow.scheduler.costs.loop_trips import recarried
from rlflow.scheduler.plan.plan import Plan

Made = tuple[str, str]


def with_nodes(plan: Plan, nodes: Iterable[Node]) -> Plan:
    """The plan with other nodes in its graph."""
    return replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))


def with_node(plan: Plan, changed: Node) -> Plan:
    """The plan with another node under the name that it has."""
    return with_nodes(plan, (changed if n.name == changed.name else n for n in plan.graph.nodes))


def rebound(node: Node, moved: Mapping[Made, tuple[str, Field]]) -> Node:
    """The node with every (source, field) of `moved` read from the source and field it names."""
    node = recarried(node, {made: (name, f.name) for made, (name, f) in moved.items()})
    if not any((b.source, b.field.name) in moved for b in node.inputs):
        return node
    inputs = []
    for bound in node.inputs:
        source, field = moved.get((bound.source, bound.field.name), (bound.source, bound.field))
        inputs.append(replace(bound, source=source, field=field))
    return replace(node, inputs=tuple(inputs))


def temperature_of(node: Node, field: str) -> float:
    """The temperature at which a forward makes the log-probs of that name."""
    given = node.as_a(Scoring).temperature
    if not isinstance(given, tuple):
        return float(given)
    return float(given[[made.name for made in node.op.outputs].index(field)])


def scores_tokens(node: Node) -> bool:
    """Whether a node is a forward that makes log-probs."""
    return node.op.use == "forward" and node.op.name == "log_probs"
