"""Rewrites `unused node` and `unused model`: what nobody reads is not computed, nor loaded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Tokenizing
from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.rewrite.edits import with_nodes
from rlflow.scheduler.plan.plan import Plan


def unused_nodes(plan: Plan, context: Context) -> Plan:
    """Drop pure nodes that nobody reads, and those that only they read.

    A field that a node would hand on to nobody does not count as read.
    """
    kept, dropped = _kept(plan.graph)
    for name, why in dropped.items():
        plan = plan.noting("unused node", f"{name} is dropped: {why}")
    return plan if kept == plan.graph.nodes else with_nodes(plan, kept)


def unread(graph: Graph) -> dict[str, str]:
    """The nodes of a graph that will be dropped, each with the reason."""
    return _kept(graph)[1]


def _kept(graph: Graph) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The nodes that stay, with what is read of them, and why the others do not, the last first.

    A loop stays for an effect within it; its gate for the node that ends it, which comes later.
    """
    acting = {n.name for n in graph.nodes if n.op.effect != "pure" and not n.is_gate}
    read = {str(node.loop) for node in graph.nodes if node.name in acting and node.loop}
    fields: set[tuple[str, str]] = set()
    kept, dropped = [], {}
    for node in reversed(graph.nodes):
        ends = node.is_gate and str(node.loop) not in dropped
        if node.name not in acting | read and not ends:
            dropped[node.name] = _why(graph, node)
        else:
            left = _without_unread(node, fields)
            read.update(left.sources)
            fields.update((bound.source, bound.field.name) for bound in left.inputs)
            kept.append(left)
    return tuple(reversed(kept)), dropped


def _without_unread(node: Node, read: Collection[tuple[str, str]]) -> Node:
    """The node without what it would hand on to nobody; of each row set one field stays."""
    if not node.op.hands_on:
        return node
    asked = {wants.name for wants in node.op.inputs if wants.required}
    asked |= {name for source, name in read if source == node.name}
    inputs = [bound for bound in node.inputs if bound.name in asked]
    whole = {bound.part for bound in inputs}
    for bound in node.inputs:
        if bound.part not in whole:
            inputs.append(bound)
            whole.add(bound.part)
    left = tuple(bound for bound in node.inputs if bound in inputs)
    if left == node.inputs:
        return node
    names = {(bound.name, bound.part) for bound in left}
    wanted = tuple(wants for wants in node.op.inputs if (wants.name, wants.part) in names)
    return replace(node, op=replace(node.op, inputs=wanted), inputs=left)


def _why(graph: Graph, unused: Node) -> str:
    for node in graph.nodes:
        for declined in node.declined:
            if declined.source == unused.name:
                return f"{node.name} does not read {declined.field}: {declined.why}"
    return "nobody reads what it makes"


def unused_models(plan: Plan, context: Context) -> Plan:
    """Drop the models that no node uses; one whose tokenizer alone is used is not loaded."""
    used = {name for node in plan.graph.nodes for name in (node.model, node.drafter)}
    tokenized = {role.tokenizer for _, role in plan.graph.having(Tokenizing)}
    for model in plan.graph.models:
        if model.name not in used and model.path not in tokenized:
            plan = plan.noting("unused model", f"model {model.name} is not loaded: no node uses it")
    kept = tuple(model for model in plan.graph.models if model.name in used)
    return replace(plan, graph=replace(plan.graph, models=kept))
