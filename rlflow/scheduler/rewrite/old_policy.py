"""Rewrite `old policy`: an update compares with the current policy where that is the old one.

The ratio of a policy loss is taken against log-probs from before the first optimizer step. Where
a loss leaves the choice open (`old="auto"`) and one step is all there is, the update's own
forward gives them: the ratio is 1, and a forward of the old policy is of no use.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.graph import Binding, Declined, Graph, Node
from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.rewrite.edits import scores_tokens, temperature_of, with_node

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
    params = dict(node.params)
    if node.op.use != "train" or params.get("old") != "recomputed":
        return None
    if getattr(params.get("loss"), "old", None) != "auto":
        return None
    return next((b for b in node.inputs if b.name == "old_log_probs"), None)


def _why_kept(graph: Graph, node: Node, bound: Binding) -> str:
    """Why the current log-probs cannot take the place of those that are bound; `` if they can."""
    rules = (_several_steps, _stale_samples, _changed_before, _another_forward)
    return next((why for rule in rules if (why := rule(graph, node, bound))), "")


def _several_steps(graph: Graph, node: Node, bound: Binding) -> str:
    counts = {"epochs": node.param("epochs"), "mini-batches": node.param("mini_batches")}
    several = [f"{count} {name}" for name, count in counts.items() if count > 1]
    if not several:
        return ""
    return f"with {' of '.join(several)} the ratio needs log-probs from before the first step"


def _stale_samples(graph: Graph, node: Node, bound: Binding) -> str:
    """Of stale samples the old policy is not the one that sampled; weights may make up for that."""
    origin = graph.node(node.rows_of) if node.rows_of else node
    lag = graph.lag(origin) if origin.op.use == "rollout" else 0
    if not lag or getattr(node.param("loss"), "correction", None) is not None:
        return ""
    updates = f"{lag} update{'s' if lag > 1 else ''}"
    return f"the samples of {origin.name} may come from weights that are {updates} older"


def _changed_before(graph: Graph, node: Node, bound: Binding) -> str:
    first = graph.updates(str(node.model))[0]
    return "" if first.name == node.name else f"{first.name} changes {node.model} in between"


def _another_forward(graph: Graph, node: Node, bound: Binding) -> str:
    source = graph.node(bound.source)
    if not scores_tokens(source) or source.model != node.model:
        return f"its log-probs are not those of {node.model}"
    theirs, own = temperature_of(source, bound.field.name), float(node.param("temperature"))
    if theirs != own:
        return f"its log-probs are at temperature {theirs:g}, those of the update at {own:g}"
    return "" if _tokens(source) == _tokens(node) else "its log-probs are of other tokens"


def _tokens(node: Node) -> dict[str, tuple[str, str]]:
    return {b.name: (b.source, b.field.name) for b in node.inputs if b.name in TOKENS}


def _comparing_with_itself(node: Node, bound: Binding) -> Node:
    why = "the old policy is the current one"
    declined = Declined(source=bound.source, field=bound.field.name, why=why)
    return replace(
        node,
        inputs=tuple(b for b in node.inputs if b != bound),
        params=tuple((key, "current" if key == "old" else v) for key, v in node.params),
        declined=(*node.declined, declined),
    )
