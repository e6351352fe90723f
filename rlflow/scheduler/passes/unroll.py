"""Pass `unroll`: a loop becomes as many trips as it may take, each a copy of its nodes.

A trip reads the state that the trip before it left. The node that ends the loop reads from all
trips. How many trips run is known only in each iteration, so after each there is a gate. A loop
within another is unrolled first, so that each trip of the outer loop has an inner loop of its own.
The pass knows what ops declare, and nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import LoopEnd, Paused, Resumed
from rlflow.graph.rules.nesting import NodeName, declared_name, nodes_within, path
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.loop_trips import expected_trips
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.rewrite.edits import with_node
from rlflow.scheduler.passes.rewrite.unused import unused_models, unused_nodes
from rlflow.scheduler.plan.plan import Plan

Made = tuple[str, str]


def unroll(plan: Plan, context: Context) -> Plan:
    """Copy the nodes of every loop for each trip; fields that nobody reads of it are left out.

    Raises PlanError where a node outside of a loop reads what one inside has made: of which trip
    that would be, nobody has said; and where rows left over come later than weights may wait.
    """
    loops = [node for node, _ in plan.graph.having(LoopEnd)]
    findings = [finding for end in loops for finding in _read_from_outside(plan.graph, end)]
    findings += [f for end in loops for f in _left_over_too_late(plan.graph, end, context)]
    if findings:
        raise PlanError(*findings)
    for outermost in (end.name for end in loops if end.loop is None):
        nest = [node.name for node in nodes_within(plan.graph, outermost) if node.ends_loop]
        nest.append(outermost)
        for name in reversed(nest):
            if plan.graph.has_node(name):
                plan = with_node(plan, _pruned(plan.graph, plan.graph.node(name)))
                plan = unused_nodes(plan, context)
        for name in nest:
            if plan.graph.has_node(name):
                plan = _unrolled(plan, plan.graph.node(name), context)
    return unused_models(plan, context) if loops else plan


def _read_from_outside(graph: Graph, end: Node) -> list[Finding]:
    within = {node.name for node in nodes_within(graph, end.name)}
    own = {node.name for node in graph.nodes if node.loop == end.name}
    found = []
    for node in graph.nodes:
        if node.name in within or node.name == end.name:
            continue
        found += [
            Finding(
                code="E127",
                what=f"{node.name!r} reads {bound.name!r} from within loop {end.name!r}",
                where=node.where,
                got=f"{bound.field.name} of {bound.source}, which each trip makes anew",
                expected=f"the fields of the handle that ops.repeat returned: {end.name}",
            )
            for bound in node.inputs
            if bound.source in own
        ]
    return found


def _left_over_too_late(graph: Graph, end: Node, context: Context) -> list[Finding]:
    """A finding where weights would have to stay old for a rollout and become new for a forward.

    The second trip of iteration i + 1 waits for what iteration i leaves over, and that for
    forwards of the newest weights; a rollout that is 2 updates behind needs those from before.
    """
    loop = end.as_a(LoopEnd)
    if not loop.keeps_surplus or loop.at_most == 1:
        return []
    using = [node for node in nodes_within(graph, end.name) if node.model is not None]
    for node in using:
        behind = graph.lag(node) - (node.role(Paused) is not None)
        on = assignment(node, context.placement)
        if behind < 2 or on is None or on.weights == "own":
            continue
        for other in using:
            there = assignment(other, context.placement)
            newest = other.op.use == "forward" and not other.reads_base
            shared = there is not None and there.pool == on.pool
            if other.model == node.model and newest and shared and graph.updates(str(node.model)):
                return [_late(node, other, end, behind)]
    return []


def _late(node: Node, other: Node, end: Node, behind: int) -> Finding:
    return Finding(
        code="E129",
        what=f"{node.name!r} and {other.name!r} of loop {end.name!r} need weights of "
        "different age at one time",
        where=other.where,
        got=f"{node.name} is {behind} updates behind, {other.name} reads the newest weights, and "
        f"{end.name} keeps rows for the next iteration: all on one copy of {node.model}",
        expected=f"{node.name} on a pool of its own, staleness=1, or {other.name} after the loop",
        fix='surplus="drop"',
    )


def _pruned(graph: Graph, end: Node) -> Node:
    """The node that ends a loop with the fields that somebody reads, and those it ends by."""
    read = {b.field.name for node in graph.nodes for b in node.inputs if b.source == end.name}
    read |= {end.as_a(LoopEnd).when, "group", "reward"}
    op = replace(end.op, inputs=tuple(wanted for wanted in end.op.inputs if wanted.name in read))
    return replace(end, op=op, inputs=tuple(b for b in end.inputs if b.name in read))


def _unrolled(plan: Plan, end: Node, context: Context) -> Plan:
    graph, loop = plan.graph, end.as_a(LoopEnd)
    count = loop.at_most
    body = nodes_within(graph, end.name)
    carried: dict[Made, Made] = {
        (first, field): (source, made) for first, field, source, made in loop.carried
    }
    trips: list[list[Node]] = []
    names: dict[str, str] = {}
    for index in range(count):
        before, names = names, {node.name: _copied(graph, node, index) for node in body}
        moved = {
            made: (before[source], field) for made, (source, field) in carried.items() if index
        }
        trips.append(
            [
                _copy(node, (index, count) if node.loop == end.name else None, names, moved)
                for node in body
                if index + 1 < count or not node.is_gate or node.loop != end.name
            ]
        )
    every = tuple(
        replace(bound, source=_copied(graph, graph.node(bound.source), index))
        for index in range(count)
        for bound in end.inputs
    )
    params = tuple((key, value) for key, value in end.params if key != "carried")
    ended = replace(end, inputs=every, params=params)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name == end.name:
            nodes += [copy for trip in trips for copy in trip]
            nodes.append(ended)
        elif node.name not in names:
            nodes.append(node)
    mean, how = expected_trips(end, graph, context.costs)
    around = f" in each trip of {end.loop}" if end.loop is not None else ""
    text = f"{end.name} takes at most {count} trips{around}, {mean:.3g} {how}; "
    text += "a trip is left out where the loop is over"
    plan = replace(plan, graph=replace(graph, nodes=tuple(nodes)))
    return plan.noting("loop", text)


def _copied(graph: Graph, node: Node, index: int) -> str:
    """The name of a node's copy for a trip of the loop around all that it is of already."""
    return str(NodeName(declared_name(node.name), (index, *path(graph, node))))


def _copy(
    node: Node,
    trip: tuple[int, int] | None,
    names: Mapping[str, str],
    moved: Mapping[Made, Made],
) -> Node:
    """A node of one trip, reading from its own trip or the state that the one before left.

    One of a loop within the loop has a `trip` of that already, and is in a copy of it.
    """
    inputs = tuple(_rebound(bound, names, moved) for bound in node.inputs)
    rows = node.rows_of
    resumed = node.role(Resumed)
    if resumed is not None:
        node = node.being(replace(resumed, rollout=names.get(resumed.rollout, resumed.rollout)))
    return replace(
        node,
        name=names[node.name],
        inputs=inputs,
        rows_of=names.get(rows, rows) if rows is not None else None,
        loop=names.get(str(node.loop), node.loop),
        trip=trip or node.trip,
    )


def _rebound(bound: Binding, names: Mapping[str, str], moved: Mapping[Made, Made]) -> Binding:
    state = moved.get((bound.source, bound.field.name))
    if state is not None:
        source, field = state
        return replace(bound, source=source, field=replace(bound.field, name=field))
    return replace(bound, source=names.get(bound.source, bound.source))
