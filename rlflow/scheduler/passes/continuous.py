"""The other half of pass `pause`: rollouts that never drain.

With `continuous` a rollout keeps its unfinished rows from one iteration to the next. It becomes a
flow: prompts are drawn as many iterations ahead as rows may live through updates, and what it
keeps is stated like any other rows that a node keeps. Of the `staleness` that is allowed one update
is for running beside the update, where its devices are others; the rest is how many updates a row
may live through. The passes that bring weights, order and verify need no rule for it. The pass
knows what ops declare, and no engine's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.graph.placement import On
from rlflow.graph.roles import Drafted, Drawn, Recalling, Routed, Sharing
from rlflow.graph.user.engines import SGLang
from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.oversample import why_together
from rlflow.scheduler.plan.plan import Plan

RULE = "continuous"


def continuous(plan: Plan, context: Context) -> Plan:
    """Have every rollout that runs ahead go on from iteration to iteration, where that is said.

    Raises PlanError where a rollout cannot, and where no row could live through an update.
    """
    if not context.placement.continuous:
        return plan
    graph = plan.graph
    found = [node for node in graph.nodes if _samples(graph, node)]
    findings = [finding for node in found for finding in _findings(plan, node, context)]
    if not found:
        findings = [_idle(graph, "no rollout of a model that learns", graph.staleness)]
    if findings:
        raise PlanError(*findings)
    changed: dict[str, Node] = {}
    for node in found:
        beside = _beside(plan, node, context)
        span = graph.staleness - beside
        source = graph.node(node.sources[0])
        op = replace(
            node.op,
            body=node.op.continued,
            recalls=True,
            roles=(*node.op.roles, Recalling),
        )
        replicas = _replicas(plan, node, context)
        changed[node.name] = replace(node, op=op).being(Recalling(keep=span))
        changed[source.name] = source.being(replace(source.as_a(Drawn), ahead=span))
        plan = plan.noting(RULE, _text(node, source, span, beside, replicas))
    nodes = tuple(changed.get(node.name, node) for node in graph.nodes)
    return replace(plan, graph=replace(graph, nodes=nodes))


def _samples(graph: Graph, node: Node) -> bool:
    """Whether a node samples rows that a model learns from, which others go on from its prompts."""
    learns = node.model is not None and bool(graph.updates(node.model))
    return learns and node.op.use == "rollout" and node.op.rows == "expand"


def _beside(plan: Plan, node: Node, context: Context) -> int:
    """1 where a rollout runs beside the update, on other devices; 0 where they take turns."""
    update = plan.graph.updates(str(node.model))[-1]
    homes = [_devices(plan, assignment(each, context.placement)) for each in (node, update)]
    return int(homes[0].isdisjoint(homes[1]))


def _replicas(plan: Plan, node: Node, context: Context) -> int:
    """How many engines decode its rows, each with all of the model."""
    where = assignment(node, context.placement)
    ranks = 1 if where is None else (where.fsdp or 1) * (where.tp or 1)
    return len(_devices(plan, where)) // ranks or 1


def _devices(plan: Plan, where: On | None) -> set[int]:
    return set() if where is None else set(plan.pools[where.pool])


def _findings(plan: Plan, node: Node, context: Context) -> Iterator[Finding]:
    """Why a rollout cannot be continuous."""
    graph = plan.graph
    beside = _beside(plan, node, context)
    if graph.staleness <= beside:
        yield _idle(graph, f"staleness={graph.staleness}", graph.staleness, beside + 1)
    source = graph.node(node.sources[0]) if node.sources else None
    drawn = None if source is None else source.role(Drawn)
    others = [
        other.name
        for other in graph.nodes
        if other is not node and source is not None and source.name in other.sources
    ]
    where = assignment(node, context.placement)
    options = None if where is None else where.options
    known = options is None or isinstance(options, SGLang)
    # Ranks of an engine in a process of its own have its rows in one place, and count no turns.
    axes = {} if where is None else {"fsdp": where.fsdp, "tp": where.tp, "ep": where.ep}
    cut = [f"{axis}={size}" for axis, size in axes.items() if size and size > 1]
    reasons = (
        (node.op.chooses, why_together(node)),
        (
            not (node.op.continued or node.op.chooses),
            f"op {node.op.name} has no way to go on with its rows",
        ),
        (node.loop is not None, f"it is in a loop, {node.loop}"),
        (not node.always, "it does not run in every iteration"),
        (node.role(Drafted) is not None, "a drafter proposes its tokens"),
        (node.role(Routed) is not None, "it records routing"),
        (drawn is None or len(node.sources) != 1, "its prompts come from another op than prompts"),
        (source is not None and source.role(Sharing) is not None, "pass rates choose its prompts"),
        (bool(others), f"{', '.join(others)} read its prompts too"),
        (context.placement.pause_at is not None, "pause_at says where it takes newer weights"),
        (options is None and bool(cut), f"ranks share its weights, {' '.join(cut)}"),
        (not known, f"its engine is {'' if options is None else options.title}"),
    )
    for wrong, got in reasons:
        if wrong:
            yield Finding(
                code="E292",
                what=f"{node.name} cannot be continuous",
                where=node.where,
                got=got,
                expected="a rollout of prompts that it alone reads, by engines in the workers of "
                "devices that each have all of the model, or by those of SGLang",
                fix="no continuous, or stream, which hands rows on as they end",
            )


def _idle(graph: Graph, got: str, staleness: int, least: int = 1) -> Finding:
    return Finding(
        code="E291",
        what="continuous would do nothing: no row may live through an update",
        where=graph.source,
        got=got,
        expected=f"staleness of {least} or more, and a rollout of a model that learns",
        fix=f"staleness={max(least, staleness)}",
    )


def _text(node: Node, source: Node, span: int, beside: int, replicas: int) -> str:
    """What a reader of the plan should know of a flow."""
    lives = f"{span} update{'' if span == 1 else 's'}"
    batch = source.as_a(Drawn).batch
    text = f"{node.name} never drains: prompts begin as rows end, up to {span} iteration"
    text += f"{'' if span == 1 else 's'} ahead; an iteration gets the {batch} groups that are "
    text += f"complete first. A row lives through {lives} at the most"
    text += ", and weights are 1 update behind as it runs beside the update" if beside else ""
    if replicas > 1:
        text += f"; a prompt goes to that of {replicas} replicas with the fewest live rows"
    return f"{text}; after each update what rows have so far is read anew"
