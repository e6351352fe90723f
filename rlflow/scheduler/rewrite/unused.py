"""Rewrites `unused node` and `unused model`: what nobody reads is not computed, nor loaded."""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.rewrite.edits import with_nodes


def unused_nodes(plan: Plan, context: Context) -> Plan:
    """Drop pure nodes that nobody reads, and those that only they read."""
    read: set[str] = set()
    kept = []
    graph = plan.graph
    for node in reversed(graph.nodes):
        if node.op.effect == "pure" and node.name not in read:
            text = f"{node.name} is dropped: {_why(graph, node)}"
            plan = plan.noting("unused node", text)
        else:
            read.update(node.sources)
            kept.append(node)
    return plan if len(kept) == len(graph.nodes) else with_nodes(plan, reversed(kept))


def _why(graph: Graph, unused: Node) -> str:
    for node in graph.nodes:
        for declined in node.declined:
            if declined.source == unused.name:
                return f"{node.name} does not read {declined.field}: {declined.why}"
    return "nobody reads what it makes"


def unused_models(plan: Plan, context: Context) -> Plan:
    """Drop the models that no node uses; one whose tokenizer alone is used is not loaded."""
    used = {name for node in plan.graph.nodes for name in (node.model, node.drafter)}
    tokenized = {dict(node.params).get("tokenizer") for node in plan.graph.nodes}
    for model in plan.graph.models:
        if model.name not in used and model.path not in tokenized:
            plan = plan.noting("unused model", f"model {model.name} is not loaded: no node uses it")
    kept = tuple(model for model in plan.graph.models if model.name in used)
    return replace(plan, graph=replace(plan.graph, models=kept))
