"""Rewrite `old policy`: an update compares with the current policy where that is the old one.

Only where the loss leaves the choice open (`old="auto"`), and where `rlflow.graph.rules.old_policy`
says that the weights which the update begins with are the old policy.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.fields import Binding, Declined
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Learning
from rlflow.graph.rules.old_policy import why_not_current
from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.rewrite.edits import scores_tokens, temperature_of, with_node
from rlflow.scheduler.plan.plan import Plan

TOKENS = ("prompt_tokens", "response_tokens")


def old_policy(plan: Plan, context: Context) -> Plan:
    """Leave old log-probs unread where they are those of the update's only forward."""
    for node in plan.graph.nodes:
        bound = _recomputed(node)
        if bound is None:
            continue
        why = _why_kept(plan.graph, node, bound)
        if why:
            text = f"{bound.source} is kept for {node.name}: {why}"
            plan = plan.noting("old policy", text)
            continue
        origin = f" of {node.rows_of}" if node.rows_of else ""
        text = (
            f"{node.name} does not read {bound}: its one optimizer step begins with the weights "
            f"that the samples{origin} come from, so the ratio is 1"
        )
        plan = with_node(plan, _comparing_with_itself(node, bound)).noting("old policy", text)
    return plan


def _recomputed(node: Node) -> Binding | None:
    """The old log-probs that an update reads because its loss left the choice open."""
    learning = node.role(Learning)
    if learning is None or learning.old != "recomputed":
        return None
    if getattr(learning.loss, "old", None) != "auto":
        return None
    return next((b for b in node.inputs if b.name == "old_log_probs"), None)


def _why_kept(graph: Graph, node: Node, bound: Binding) -> str:
    """Why the current log-probs cannot take the place of those that are bound; `` if they can."""
    return why_not_current(graph, node) or _another_forward(graph, node, bound)


def _another_forward(graph: Graph, node: Node, bound: Binding) -> str:
    source = graph.node(bound.source)
    if not scores_tokens(source) or source.model != node.model:
        return f"its log-probs are not those of {node.model}"
    theirs, own = temperature_of(source, bound.field.name), node.as_a(Learning).temperature
    if own is not None and theirs != own:
        return f"its log-probs are at temperature {theirs:g}, those of the update at {own:g}"
    return "" if _tokens(source) == _tokens(node) else "its log-probs are of other tokens"


def _tokens(node: Node) -> dict[str, tuple[str, str]]:
    return {b.name: (b.source, b.field.name) for b in node.inputs if b.name in TOKENS}


def _comparing_with_itself(node: Node, bound: Binding) -> Node:
    why = "the old policy is the current one"
    declined = Declined(source=bound.source, field=bound.field.name, why=why)
    return replace(
        node.being(replace(node.as_a(Learning), old="current")),
        inputs=tuple(b for b in node.inputs if b != bound),
        declined=(*node.declined, declined),
    )
