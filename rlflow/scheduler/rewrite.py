"""Pass `rewrite`: what is left to do once equal work is merged and useless work dropped.

Knows the graph and what ops declare; neither devices nor time.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Plan


def rewrite(plan: Plan, context: Context) -> Plan:
    """Merge nodes that are equal; drop nodes and models that nothing needs."""
    plan = _merge_equal(plan)
    while True:
        unused = _first_unused(plan.graph)
        if unused is None:
            break
        plan = _drop(plan, unused)
    used = {node.model for node in plan.graph.nodes}
    used |= {dict(node.params).get("tokenizer") for node in plan.graph.nodes}
    for model in plan.graph.models:
        if model.name not in used and model.path not in used:
            plan = plan.noting("unused model", f"model {model.name} is not loaded: no node uses it")
    kept = tuple(model for model in plan.graph.models if model.name in used)
    return replace(plan, graph=replace(plan.graph, models=kept))


def _merge_equal(plan: Plan) -> Plan:
    seen: dict[tuple[object, ...], str] = {}
    for node in plan.graph.nodes:
        if node.op.effect != "pure" or node.op.rows != "same":
            continue
        key = (
            node.op,
            node.inputs,
            repr(node.params),
            node.model,
            node.every,
            id(node.op.function),
        )
        first = seen.setdefault(key, node.name)
        if first != node.name:
            nodes = tuple(
                replace(
                    other,
                    inputs=tuple(
                        replace(b, source=first) if b.source == node.name else b
                        for b in other.inputs
                    ),
                )
                for other in plan.graph.nodes
                if other.name != node.name
            )
            text = f"{node.name} computes what {first} computes: done once"
            return _merge_equal(
                replace(plan, graph=replace(plan.graph, nodes=nodes)).noting("equal nodes", text)
            )
    return plan


def _first_unused(graph: Graph) -> Node | None:
    read = {source for node in graph.nodes for source in node.sources}
    for node in reversed(graph.nodes):
        if node.op.effect == "pure" and node.name not in read:
            return node
    return None


def _drop(plan: Plan, unused: Node) -> Plan:
    why = next(
        (
            f"{node.name} does not read {declined.field}: {declined.why}"
            for node in plan.graph.nodes
            for declined in node.declined
            if declined.source == unused.name
        ),
        "nobody reads what it makes",
    )
    nodes = tuple(node for node in plan.graph.nodes if node.name != unused.name)
    dropped = replace(plan, graph=replace(plan.graph, nodes=nodes))
    return dropped.noting("unused node", f"{unused.name} is dropped: {why}")
