"""Pass `bind`: which instance runs each node, on which devices, and how its rows lie there.

Everything that a placement gets wrong about models, pools and rows is refused here, all
of a kind together. Time and memory come later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.errors import Finding, PlanError, known_names, near_names
from rlflow.graph.callables import name_of
from rlflow.graph.graph import Graph, Node
from rlflow.graph.placement import On, Placement
from rlflow.graph.roles import (
    Averaged,
    Drafted,
    PartsTogether,
    Paused,
    Portion,
    Recorded,
    Resumed,
)
from rlflow.graph.rules.nesting import declared_name, keeps_surplus
from rlflow.graph.schedule import due_text
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.loop_trips import gate_before, trip_of
from rlflow.scheduler.costs.microbatches import fitted_to_room
from rlflow.scheduler.engines.drafters import (
    drafter_findings,
    drafting_instance,
    drafts_findings,
    with_drafters,
)
from rlflow.scheduler.engines.engines import (
    kept_asleep,
    option_findings,
    use_findings,
    with_pool,
)
from rlflow.scheduler.engines.notes import noting_engines
from rlflow.scheduler.passes.bind.averages import average_findings
from rlflow.scheduler.passes.bind.contexts import with_way_to_attend
from rlflow.scheduler.passes.bind.fitted import noting_fitted
from rlflow.scheduler.passes.bind.instances import (
    USES,
    layout_findings,
    make_instances,
    memory_parts,
    pool_findings,
    said_of_sequence,
    serving_instance,
    trained_twice,
)
from rlflow.scheduler.passes.bind.kept_rows import with_kept_rows
from rlflow.scheduler.passes.bind.kernels import noting_kernels
from rlflow.scheduler.passes.bind.pipelines import rollout_findings
from rlflow.scheduler.passes.bind.row_checks import (
    dispatch_findings,
    division_findings,
    state_findings,
)
from rlflow.scheduler.passes.bind.saves import with_loads, with_saves
from rlflow.scheduler.plan.hosts import host_findings
from rlflow.scheduler.plan.plan import HOST, Action, Dep, Instance, Plan, Reason, Spread, Trip
from rlflow.scheduler.plan.row_layout import Place, cut_groups, makes, num_parts, takes

Versions = tuple[tuple[str, int], ...]


def bind(plan: Plan, context: Context) -> Plan:
    """Give every node a pool, where it uses a model an instance, and its rows a place.

    Raises PlanError with every finding of the first kind that there is: models without a
    place, layouts that do not fit, rows that cannot lie as their op says.
    """
    findings: list[Finding] = []
    chosen: dict[str, On] = {}
    for node in plan.graph.nodes:
        where = place_of(node, plan.graph, context.placement)
        if where is not None:
            chosen[node.name] = where
        elif node.model is not None and node.averages is None:
            findings.append(_unplaced(node, plan, context.placement))
    _refuse(findings)
    _refuse(use_findings(plan.graph.nodes, chosen) + rollout_findings(plan.graph.nodes, chosen))
    engines = [(node, chosen[node.name]) for node in plan.graph.nodes if node.name in chosen]
    _refuse([f for node, where in engines for f in option_findings(node, where, context.costs)])
    _refuse(average_findings(plan.graph, context.placement, plan.pools, chosen))
    made = replace(plan, instances=with_drafters(make_instances(plan, chosen), plan, chosen))
    served: dict[str, list[Node]] = {}
    for node in plan.graph.nodes:
        if node.model is not None:
            serving = serving_instance(made, node, chosen[node.name])
            served.setdefault(serving.name, []).append(node)
            if node.role(Drafted):
                beside = drafting_instance(made, node, serving)
                served.setdefault(beside.name, []).append(node)
    _refuse([f for i in made.instances if i.name in served for f in pool_findings(i, plan)])
    instances = tuple(
        _fitted(instance, served[instance.name], made, context, chosen)
        for instance in made.instances
        if instance.name in served
    )
    findings = trained_twice(plan, instances)
    findings += [f for i in instances for f in layout_findings(i, plan, context.costs)]
    findings += drafter_findings(made, instances, served, context.costs.shapes)
    for engine in (each for each in instances if each.engine_plan.drafts):
        findings += drafts_findings(engine, served[engine.name], context.costs)
    for instance in instances:
        model = plan.graph.model(instance.model)
        findings += host_findings(instance, model, context.cluster.host_of)
    _refuse(findings)
    costs = context.costs
    parts = tuple(part for i in instances for part in memory_parts(i, served[i.name], costs))
    bound = replace(plan, instances=instances, parts=parts)
    bound = noting_kernels(noting_fitted(bound, made.instances, served, costs), costs)
    bound = with_kept_rows(noting_engines(bound, served, context.costs), context.costs)
    bound = with_loads(with_saves(bound, context.costs), context.costs)
    places = {n.name: _place(n, chosen.get(n.name), bound) for n in plan.graph.nodes}
    _refuse(state_findings(bound.graph, places))
    spreads = _spread_rows(bound, places)
    return replace(
        bound,
        actions=tuple(
            _run(node, places[node.name], *spreads[node.name], bound, context)
            for node in plan.graph.nodes
        ),
    )


def _fitted(
    instance: Instance, nodes: list[Node], plan: Plan, context: Context, chosen: Mapping[str, On]
) -> Instance:
    """The instance with the uses of all the nodes that it serves, in micro-batches that fit.

    What is recomputed, and whether ranks share the sequence, is free where no placement says it.
    """
    used = {node.op.use or "forward" for node in nodes}
    instance = replace(
        context.costs.staged(instance),
        uses=tuple(use for use in instance.uses if use in used),
        kept_whole=instance.kept_whole or instance.name in context.kept_whole,
        reduces_last=instance.reduces_last or instance.name in context.reduces_last,
    )
    room = min(plan.budget(device) for device in instance.devices)
    if instance.engine_plan.own_process:
        less = min(context.rooms.get(node.name, room) for node in nodes)
        return with_pool(instance, nodes, less, context.costs)
    if instance.engine_plan.lies_inside:
        return instance
    instance = with_way_to_attend(instance, nodes, chosen, context.costs)
    passed = [node for node in nodes if node.averages is None]
    free = not any(chosen[node.name].recompute is not None for node in nodes)
    left = room - left_by_engines(instance, plan, context.costs)
    sequence = said_of_sequence(instance, [(node, chosen[node.name]) for node in nodes])
    return fitted_to_room(
        instance,
        passed,
        left,
        context.costs,
        rooms=context.rooms,
        free=free,
        sequence=sequence,
    )


def left_by_engines(instance: Instance, plan: Plan, costs: Costs) -> int:
    """Bytes of a device that engines beside an instance keep while they sleep."""
    mine = set(instance.devices)
    beside = (each for each in plan.engines if not mine.isdisjoint(each.devices))
    return sum(kept_asleep(each, costs) for each in beside)


def _refuse(findings: list[Finding]) -> None:
    if findings:
        raise PlanError(*findings)


def _place(node: Node, where: On | None, plan: Plan) -> Place:
    if where is None:
        return Place(pool="host", devices=(HOST,), instance=None)
    instance = serving_instance(plan, node, where) if node.model else None
    return Place(pool=where.pool, devices=plan.pools[where.pool], instance=instance)


def _spread_rows(
    plan: Plan, places: dict[str, Place]
) -> dict[str, tuple[Spread | None, Spread | None]]:
    """What every node takes and makes, by its name; a node comes after those it reads."""
    found: dict[str, tuple[Spread | None, Spread | None]] = {}
    made: dict[str, Spread] = {}
    findings: list[Finding] = []
    for name in plan.graph.order():
        node, place = plan.graph.node(name), places[name]
        findings += dispatch_findings(node, place, made)
        lying = takes(node, place, made, _grown(node, places, made))
        taken = cut_groups(plan.graph, node, lying)
        findings += division_findings(plan.graph, node, taken)
        left = makes(node, place, taken)
        found[name] = taken, left
        if left is not None:
            made[name] = left
    _refuse(findings)
    return found


def _grown(node: Node, places: Mapping[str, Place], made: Mapping[str, Spread]) -> Spread | None:
    """How a node's rows lie in the caches of the engine that has generated them and goes on."""
    origin = node.rows_of
    if origin is None or origin == node.name or not places[node.name].remembers(places[origin]):
        return None
    return made[origin] if made[origin].rule == "generated" else None


def assignment(node: Node, placement: Placement) -> On | None:
    """The most specific assignment of a node: its name, model.use, model, then `*`.

    A node without a model runs on the host unless its name is assigned, and so does one that
    reads a record, or puts the parts of a rollout together, whatever is said of the node whose
    place it takes.
    """
    if node.role(Recorded) is not None or node.role(PartsTogether) is not None:
        return None
    gated = node.loop if node.is_gate else None
    portion = node.role(Portion)
    for name in (node.name, node.drawn_as, gated):
        declared = None if name is None else declared_name(name)
        if declared is not None and declared in placement.assign:
            return _of_part(placement.assign[declared], portion)
    if node.model is None:
        return None
    for key in (f"{node.model}.{node.op.use}", node.model, "*"):
        if key in placement.assign:
            return _of_part(placement.assign[key], portion)
    return None


def _of_part(where: On, portion: Portion | None) -> On:
    """Where a part of a rollout runs that two pools share out; itself for any other node."""
    return where.also if portion is not None and portion.helps and where.also else where


def place_of(node: Node, graph: Graph, placement: Placement) -> On | None:
    """Where a node runs: as assigned, and where an average is taken, as what it is taken of."""
    if node.averages is None:
        return assignment(node, placement)
    home = assignment(graph.updates(node.averages)[-1], placement)
    return None if home is None else home.model_copy(update={"recompute": None})


def unknown_assignments(graph: Graph, placement: Placement) -> list[Finding]:
    """A finding for every key of `assign` that names nothing in the graph as declared.

    Names of models that a pass dropped are still names: they were declared.
    """
    return [
        Finding(
            code="E211",
            what=f"the placement assigns {key!r}, which is no node, model or model.use",
            where=graph.source,
            expected=known_names(_keys(graph)),
            near=near_names(key, _keys(graph)),
        )
        for key in placement.assign
        if key not in _keys(graph)
    ]


def _keys(graph: Graph) -> list[str]:
    declared = [model.name for model in graph.models]
    uses = [f"{name}.{use}" for name in declared for use in USES]
    return list(dict.fromkeys(["*", *declared, *uses, *(node.name for node in graph.nodes)]))


def _unplaced(node: Node, plan: Plan, placement: Placement) -> Finding:
    pool = next(iter(placement.pools))
    return Finding(
        code="E210",
        what=f"model {node.model!r} is used by {node.name!r} but placement "
        f"{plan.placement!r} does not place it",
        where=node.where,
        got=f"placed: {', '.join(placement.assign) or 'nothing'}",
        fix=f'"{node.model}": rf.on("{pool}")',
    )


def _run(
    node: Node,
    place: Place,
    taken: Spread | None,
    left: Spread | None,
    plan: Plan,
    context: Context,
) -> Action:
    instance = place.instance
    trip, chance = trip_of(node, plan.graph, context.costs)
    gate = gate_before(node, plan.graph)
    after = tuple(
        Dep(action=edge.source, distance=edge.distance, kind="data")
        for edge in plan.graph.edges
        if edge.target == node.name and edge.kind == "data"
    )
    after += tuple(
        Dep(action=edge.source, distance=edge.distance, kind="order")
        for edge in plan.graph.edges
        if edge.target == node.name and edge.kind == "state"
    )
    after += (Dep(action=gate, distance=0, kind="order"),) if gate else ()
    if trip is not None and trip.gate and not trip.index and keeps_surplus(plan.graph, trip.loop):
        after += (Dep(action=trip.loop, distance=1, kind="order"),)
    needs, reads, writes = ((), (), ()) if instance is None else _weights(node, instance, plan)
    return Action(
        id=node.name,
        kind="run",
        node=node.name,
        pool=place.pool,
        devices=place.devices,
        instance=instance.name if instance else None,
        reason=Reason(rule="declared", text=_as_declared(node) + _trip(trip, chance)),
        after=after,
        needs=needs,
        reads=reads,
        writes=writes,
        takes=taken,
        makes=left,
        cost=context.costs.run(node, instance, num_parts(node, place, taken, left)),
        every=node.every,
        within=node.within,
        trip=trip,
        chance=chance,
        closing=node.op.closing,
    )


def _weights(
    node: Node, instance: Instance, plan: Plan
) -> tuple[tuple[str, ...], Versions, Versions]:
    """The parts that a node's run needs, and the versions that it reads and writes."""
    needs = instance.serving
    reads = () if node.reads_base else ((instance.name, plan.graph.lag(node)),)
    if node.op.use == "train":
        needs = (instance.weights, instance.gradients, instance.optimizer)
    source = plan.trained_instance(node.averages) if node.averages else None
    if source is not None:
        needs = (instance.weights, source.weights)
        reads = (*reads, (source.name, -1))
    if (drafted := node.role(Drafted)) is not None:
        drafter = drafting_instance(plan, node, instance)
        needs = (instance.weights, drafter.weights, *needs[1:])
        reads = (*reads, (drafter.name, plan.graph.lag_of(node, drafted.by)))
    return needs, reads, ((instance.name, -1),) if node.op.use == "train" else ()


def _trip(trip: Trip | None, chance: float) -> str:
    """Which trip through its loop an action is of, and how often that is expected to run."""
    if trip is None:
        return ""
    found = [f"trip {t.index + 1} of {t.of}" for t in reversed(trip.levels) if t.of > 1]
    later = any(level.index for level in trip.levels)
    often = f", expected in {chance:.0%} of iterations" if later else ""
    return f"; {' in '.join(found)}{often}" if found else ""


def _as_declared(node: Node) -> str:
    adapters = ", adapters off" if node.reads_base else ""
    model = f"({node.model}{adapters})" if node.model else ""
    period = due_text(node.every, node.within)
    if node.counts is not None:
        return f"ops.{node.op.name}{period}: {node.counts.describe()}"
    if (resumed := node.role(Resumed)) is not None:
        return f"ops.rollout{model}, token {resumed.first + 1} to the end"
    if (paused := node.role(Paused)) is not None:
        return f"ops.rollout{model}, to token {paused.until}"
    if (part := node.role(Portion)) is not None:
        alone = f"prompt {part.last}" if part.last == part.first + 1 else ""
        which = alone or f"prompts {part.first + 1} to {part.last}"
        return f"ops.rollout{model}, {which} of {part.of}"
    if (averaged := node.role(Averaged)) is not None:
        often = f", every {averaged.every} iterations" if averaged.every != 1 else ""
        return f"ops.average{model} of {averaged.source} v[i+1], where that is trained{often}"
    return (
        f"ops.{node.op.name}{model}{period}"
        if node.op.function is None
        else f"{node.op.name}{model} of {name_of(node.op.function)}{period}"
    )
