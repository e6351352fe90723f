"""Pass `pause`: rollouts that take newer weights on the way.

With `pause_at` a rollout becomes two nodes. The first stops after so many tokens; the second
resumes the rows that have not ended, `staleness` - 1 updates behind instead of `staleness`. Both
are ordinary nodes, so the passes that bring weights, order and verify need no rule for them. The
pass knows what ops declare, and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Paused, Resumed, SamplingOptions
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.loop_trips import recarried
from rlflow.scheduler.plan.plan import Plan

RULE = "pause"
RESUMED = ".resumed"


def pause(plan: Plan, context: Context) -> Plan:
    """Cut every rollout that runs ahead in two, where the placement says at which token.

    Raises PlanError where that would do nothing.
    """
    at = context.placement.pause_at
    if at is None:
        return plan
    graph = plan.graph
    long = [node for node in graph.nodes if _pausable(graph, node) and _longest(node) > at]
    led = {node.name: _leads_to(graph, node) for node in long}
    paused = [node for node in long if not led[node.name]]
    for node in long:
        if led[node.name]:
            text = f"{node.name} does not pause: {', '.join(led[node.name])} goes on from its rows "
            plan = plan.noting(RULE, text + f"with weights {_behind(graph.staleness)}")
    if not paused:
        raise PlanError(_idle(graph, at))
    nodes: list[Node] = []
    moved: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        nodes.append(node)
        if node in paused:
            nodes[-1] = node.being(Paused(until=at))
            nodes.append(_resumed(nodes[-1]))
            moved |= {(node.name, made.name): nodes[-1].name for made in nodes[-1].op.outputs}
    nodes = [node if node.role(Resumed) else _reading(node, moved) for node in nodes]
    for node in paused:
        text = f"{node.name} pauses after {at} tokens, takes weights that are one update newer "
        text += f"and goes on as {node.name}{RESUMED}: {_behind(graph.staleness)}, then "
        text += f"{_behind(graph.staleness - 1)}"
        plan = plan.noting(RULE, text)
    return replace(plan, graph=replace(graph, nodes=tuple(nodes)))


def _pausable(graph: Graph, node: Node) -> bool:
    """Whether a node samples with weights behind the newest, and its op can go on later."""
    learns = node.model is not None and bool(graph.updates(node.model))
    return learns and graph.lag(node) > 0 and node.op.resumed is not None


def _leads_to(graph: Graph, node: Node) -> tuple[str, ...]:
    """The rollouts of the iteration that need a node's rows and sample as far behind.

    They start before the update that its resumed half would wait for. Turns of its own episodes go
    on with the weights that it took.
    """
    rows, found = {node.name}, []
    for other in graph.nodes:
        if rows.isdisjoint(other.sources):
            continue
        rows.add(other.name)
        if _pausable(graph, other) and other.op.rows == "expand":
            found.append(other.name)
    return tuple(found)


def _longest(node: Node) -> int:
    return int(node.as_a(SamplingOptions).max_new_tokens or 0)


def _resumed(node: Node) -> Node:
    """The node that goes on with the rows of a rollout, with its options and its model."""
    op = node.op.resumed
    assert op is not None
    fields = {made.name: made for made in node.op.outputs}
    inputs = tuple(
        Binding(name=wanted.name, source=node.name, field=fields[wanted.name])
        for wanted in op.inputs
    )
    resumed = Resumed(rollout=node.name, first=node.as_a(Paused).until)
    return Node(
        name=f"{node.name}{RESUMED}",
        op=op,
        inputs=inputs,
        params=resumed.written(node.without(Paused).params),
        model=node.model,
        every=node.every,
        within=node.within,
        rows_of=node.rows_of,
        where=node.where,
        loop=node.loop,
    )


def _reading(node: Node, moved: dict[tuple[str, str], str]) -> Node:
    """The node with what a paused rollout makes read from the one that goes on with it."""
    node = recarried(node, {made: (last, made[1]) for made, last in moved.items()})
    inputs = tuple(_rebound(bound, moved) for bound in node.inputs)
    return node if inputs == node.inputs else replace(node, inputs=inputs)


def _rebound(bound: Binding, moved: dict[tuple[str, str], str]) -> Binding:
    source = moved.get((bound.source, bound.field.name))
    return bound if source is None else replace(bound, source=source)


def _behind(updates: int) -> str:
    return f"{updates} update{'' if updates == 1 else 's'} behind"


def _idle(graph: Graph, at: int) -> Finding:
    """Why a pause would do nothing."""
    if not graph.staleness:
        got = "staleness=0: no newer weights come while a rollout runs"
        return Finding(
            code="E229",
            what=f"pause_at={at} would do nothing",
            where=graph.source,
            got=got,
            fix=f"staleness=1, pause_at={at}; or no pause_at",
        )
    lengths = list(_described(graph))
    return Finding(
        code="E229",
        what=f"pause_at={at} would do nothing",
        where=graph.source,
        got="; ".join(lengths) or "no rollout of a model that learns",
        expected="a rollout of a model that learns, with more max_new_tokens than that",
        fix=f"pause_at={max(most // 2, 1)}" if (most := _most(graph)) > 1 else "no pause_at",
    )


def _most(graph: Graph) -> int:
    return max((_longest(node) for node in graph.nodes if _pausable(graph, node)), default=0)


def _described(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if _pausable(graph, node):
            yield f"{node.name} makes at most {_longest(node)} tokens"
