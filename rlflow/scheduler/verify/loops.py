"""Rules of the verifier: a trip through a loop begins after the one before has ended.

Of loops within loops that holds of each. Knows the graph and the plan; shares no code with the
passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.plan.plan import Action, Trip
from rlflow.scheduler.verify.happens_before import Facts


def trips_are_gated(facts: Facts) -> Iterator[str]:
    """Who is left out where a loop is over starts after the gate that finds that out."""
    gates: dict[tuple[str, int], list[Action]] = {}
    for a in facts.plan.actions:
        if a.trip is not None and a.trip.gate:
            gates.setdefault((a.trip.loop, a.trip.index), []).append(a)
    for (loop, index), found in gates.items():
        if len(found) > 1:
            yield f"trip {index + 1} of {loop} has {len(found)} gates"
    for a in facts.plan.actions:
        yield from _is_marked(facts, a)
        trip = a.trip
        while trip is not None:
            before = gates.get((trip.loop, trip.index - 1), [])
            if trip.index and not before:
                yield f"{a.id} is of trip {trip.index + 1} of {trip.loop}, after no gate"
            for gate in before:
                if not facts.comes_before(gate.id, a.id, 0):
                    yield f"{a.id} may start before {gate.id} says whether it is to run"
            trip = trip.within
    for (loop, index), found in gates.items():
        if index == 0:
            yield from _counts_what_is_left(facts, loop, found)


def _counts_what_is_left(facts: Facts, loop: str, gates: list[Action]) -> Iterator[str]:
    """The first gate of an iteration starts after the loop of the one before is over.

    Only where that may leave rows over, which the gate counts.
    """
    if not facts.plan.graph.has_node(loop):
        return
    if dict(facts.plan.graph.node(loop).params).get("surplus") != "keep":
        return
    for gate in gates:
        for end in facts.runs[loop]:
            if not facts.comes_before(end.id, gate.id, 1):
                yield f"{gate.id} may count what {end.id} has left over before it is over"


def _is_marked(facts: Facts, a: Action) -> Iterator[str]:
    """An action of a node is of the trip that the node is of, and moves no weights."""
    if a.node is None:
        if a.trip is not None:
            yield f"{a.id} moves weights or parts and may be left out"
        return
    node = facts.plan.graph.node(a.node)
    params = dict(node.params)
    own, due = _marked(a.trip), _due(facts.plan.graph, node)
    if own != due:
        yield f"{a.id} is marked as of {own}, its node is of {due}"
    gate = a.kind == "run" and node.op.name == "gate" and bool(due)
    if a.trip is not None and node.loop is not None:
        goal = dict(facts.plan.graph.node(node.loop).params).get("batch", 1)
        if a.trip.gate is not gate or a.trip.goal != goal or (gate and params.get("goal") != goal):
            yield f"{a.id} is no gate, or knows another goal than {goal}"
    for around in a.trip.levels[:-1] if a.trip is not None else ():
        ends = facts.plan.graph.has_node(around.loop) and facts.plan.graph.node(around.loop)
        if around.gate or (ends and around.goal != dict(ends.params).get("batch", 1)):
            yield f"{a.id} is marked as a gate of {around.loop}, or knows another goal of it"
    if a.trip is not None and a.writes:
        yield f"{a.id} writes weights and may be left out"


def _marked(trip: Trip | None) -> list[tuple[str, int, int]]:
    """The loops and trips that an action says it is of, the innermost first."""
    found: list[tuple[str, int, int]] = []
    while trip is not None:
        found.append((trip.loop, trip.index, trip.of))
        trip = trip.within
    return found


def _due(graph: Graph, node: Node) -> list[tuple[str, int, int]]:
    """The loops and trips that a node is of, by the nodes that end them, the innermost first."""
    found: list[tuple[str, int, int]] = []
    while node.trip is not None and node.loop is not None:
        found.append((node.loop, *node.trip))
        node = graph.node(node.loop)
    return found


def loops_are_read_whole(facts: Facts) -> Iterator[str]:
    """What ends a loop reads each field of every trip, once; a copy is named by its trips."""
    graph = facts.plan.graph
    for node in graph.nodes:
        params = dict(node.params)
        if "at_most" not in params:
            continue
        inside = [n for n in graph.nodes if n.loop == node.name]
        if any(n.trip is None for n in inside):
            yield f"the trips of {node.name} are not told apart"
            continue
        for n in inside:
            numbers = [index + 1 for _, index, _ in reversed(_due(graph, n))]
            copy = f"#{'.'.join(map(str, numbers))}" if max(numbers) > 1 else ""
            if n.name != n.name.partition("#")[0] + copy:
                yield f"{n.name} is of trip {numbers} and not named by it"
        count = params["at_most"]
        trips = {n.trip[0] for n in inside if n.trip is not None}
        if trips != set(range(count)):
            yield f"{node.name} takes at most {count} trips, the plan has {sorted(trips)}"
        read: dict[str, list[int]] = {}
        made: dict[str, set[tuple[str, str]]] = {}
        for bound in node.inputs:
            source = graph.node(bound.source)
            if source.loop != node.name or source.trip is None:
                yield f"{node.name} reads {bound} from outside of its loop"
            else:
                read.setdefault(bound.name, []).append(source.trip[0])
                first = bound.source.partition("#")[0]
                made.setdefault(bound.name, set()).add((first, bound.field.name))
        for name, found in read.items():
            if sorted(found) != list(range(count)):
                yield f"{node.name} reads {name} of trips {sorted(found)} of {count}"
            if len(made[name]) > 1:
                yield f"{node.name} reads {name} of {sorted(made[name])}"
