"""Rewrite `equal nodes`: nodes that compute the same from the same inputs become one."""

from __future__ import annotations

from rlflow.graph.fields import Field
from rlflow.graph.graph import Node
from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.rewrite.edits import Made, rebound, with_nodes
from rlflow.scheduler.plan.plan import Plan


def equal_nodes(plan: Plan, context: Context) -> Plan:
    """Keep the first of the nodes that apply one pure op to equal inputs with equal options.

    Nodes are looked at in the order declared, in which sources come first, so chains of equal
    nodes fall together. Ops that make rows are left alone: their rows carry the node's name.
    """
    moved: dict[Made, tuple[str, Field]] = {}
    first: dict[tuple[object, ...], str] = {}
    kept = []
    for declared in plan.graph.nodes:
        node = rebound(declared, moved)
        known = first.setdefault(_key(node), node.name)
        if known == node.name:
            kept.append(node)
            continue
        moved |= {(node.name, made.name): (known, made) for made in node.op.outputs}
        text = f"{node.name} computes what {known} computes: done once"
        plan = plan.noting("equal nodes", text)
    return with_nodes(plan, kept) if moved else plan


def _key(node: Node) -> tuple[object, ...]:
    """Equal for nodes that compute the same; a node that must stay has one of its own."""
    if node.op.effect != "pure" or node.op.rows != "same" or node.loop is not None:
        return (node.name,)
    function = id(node.op.function)
    when = (node.every, node.within)
    return (node.op, node.inputs, repr(node.params), node.model, when, function)
