"""Pass `unroll`: a loop becomes as many trips as it may take, each a copy of its nodes.

A trip reads what the trip before left of the state that goes round; the node that ends the loop
reads from all trips. Which of them run is found out in every iteration: after each there is a
gate. The pass knows what ops declare, and nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Binding, Graph, Node
from rlflow.scheduler.bind import assignment
from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.rewrite.edits import with_node
from rlflow.scheduler.rewrite.unused import unused_nodes
from rlflow.scheduler.trips import expected_trips

Made = tuple[str, str]


def unroll(plan: Plan, context: Context) -> Plan:
    """Copy the nodes of every loop for each trip; fields that nobody reads of it are left out.

    Raises PlanError where a node outside of a loop reads what one inside has made: of which trip
    that would be, nobody has said; and where rows left over come later than weights may wait.
    """
    loops = [node for node in plan.graph.nodes if node.ends_loop and node.op.function is None]
    findings = [finding for end in loops for finding in _read_from_outside(plan.graph, end)]
    findings += [f for end in loops for f in _left_over_too_late(plan.graph, end, context)]
    if findings:
        raise PlanError(*findings)
    for end in loops:
        plan = with_node(plan, _pruned(plan.graph, end))
        plan = unused_nodes(plan, context)
        plan = _unrolled(plan, plan.graph.node(end.name), context)
    return plan


def _read_from_outside(graph: Graph, end: Node) -> list[Finding]:
    inside = {node.name for node in graph.nodes if node.loop == end.name}
    found = []
    for node in graph.nodes:
        if node.name in inside or node.name == end.name:
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
            if bound.source in inside
        ]
    return found


def _left_over_too_late(graph: Graph, end: Node, context: Context) -> list[Finding]:
    """A finding where weights would have to stay old for a rollout and become new for a forward.

    The second trip of iteration i + 1 waits for what iteration i leaves over, and that for
    forwards of the newest weights; a rollout that is 2 updates behind needs those from before.
    """
    if dict(end.params).get("surplus") != "keep" or end.param("at_most") == 1:
        return []
    inside = [node for node in graph.nodes if node.loop == end.name and node.model is not None]
    for node in inside:
        behind = graph.lag(node) - ("until" in dict(node.params))
        on = assignment(node, context.placement)
        if behind < 2 or on is None or on.weights == "own":
            continue
        for other in inside:
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
    read |= {str(end.param("when")), "group", "reward"}
    op = replace(end.op, inputs=tuple(wanted for wanted in end.op.inputs if wanted.name in read))
    return replace(end, op=op, inputs=tuple(b for b in end.inputs if b.name in read))


def _unrolled(plan: Plan, end: Node, context: Context) -> Plan:
    graph, count = plan.graph, int(end.param("at_most"))
    body = [node for node in graph.nodes if node.loop == end.name]
    carried: dict[Made, Made] = {
        (first, field): (source, made)
        for first, field, source, made in dict(end.params).get("carried", ())
    }
    trips: list[list[Node]] = []
    names: dict[str, str] = {}
    for index in range(count):
        before, names = names, {node.name: _numbered(node.name, index) for node in body}
        moved = {
            made: (before[source], field) for made, (source, field) in carried.items() if index
        }
        trips.append(
            [
                _copy(node, index, count, names, moved)
                for node in body
                if index + 1 < count or not node.is_gate
            ]
        )
    every = tuple(
        replace(bound, source=_numbered(bound.source, index))
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
        elif node.loop != end.name:
            nodes.append(node)
    mean, how = expected_trips(end, graph, context.costs)
    text = f"{end.name} takes at most {count} trips, {mean:.3g} {how}; "
    text += "a trip is left out where the loop is over"
    plan = replace(plan, graph=replace(graph, nodes=tuple(nodes)))
    return plan.noting("loop", text)


def _numbered(name: str, index: int) -> str:
    return f"{name}#{index + 1}" if index else name


def _copy(
    node: Node, index: int, count: int, names: Mapping[str, str], moved: Mapping[Made, Made]
) -> Node:
    """A node of one trip, reading from its own trip or the state that the one before left."""
    inputs = tuple(_rebound(bound, names, moved) for bound in node.inputs)
    rows = node.rows_of
    params = [(k, names.get(v, v) if k == "resumes" else v) for k, v in node.params]
    return replace(
        node,
        name=names[node.name],
        inputs=inputs,
        rows_of=names.get(rows, rows) if rows is not None else None,
        params=tuple(params),
        trip=(index, count),
    )


def _rebound(bound: Binding, names: Mapping[str, str], moved: Mapping[Made, Made]) -> Binding:
    state = moved.get((bound.source, bound.field.name))
    if state is not None:
        source, field = state
        return replace(bound, source=source, field=replace(bound.field, name=field))
    return replace(bound, source=names.get(bound.source, bound.source))
