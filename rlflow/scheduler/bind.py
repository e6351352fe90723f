"""Passes `rewrite` and `bind`: what is left to do, and which instance does it where.

Layouts that the placement leaves out are derived here and shown; sizes that do not
divide are refused here. Time and memory come later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rlflow.errors import Finding, PlanError, known_names, near_names
from rlflow.graph.check import num_prompts
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Use
from rlflow.graph.placement import On, Placement
from rlflow.scheduler.cluster import Cluster
from rlflow.scheduler.costs import Costs
from rlflow.scheduler.plan import HOST, Action, Dep, Instance, Part, Plan, Reason
from rlflow.scheduler.shapes import Shape

USES: tuple[Use, ...] = ("train", "forward", "rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the passes look things up in, and do not change."""

    placement: Placement
    cluster: Cluster
    costs: Costs
    near: Path | None = None


def rewrite(plan: Plan, context: Context) -> Plan:
    """Merge nodes that are equal; drop nodes and models that nothing needs."""
    plan = _merge_equal(plan)
    while True:
        unused = _first_unused(plan.graph)
        if unused is None:
            break
        plan = _drop(plan, unused)
    used = {node.model for node in plan.graph.nodes}
    used |= {dict(node.params).get("tokenizer") for node in plan.graph.nodes}
    for model in plan.graph.models:
        if model.name not in used and model.path not in used:
            plan = plan.noting("unused model", f"model {model.name} is not loaded: no node uses it")
    kept = tuple(model for model in plan.graph.models if model.name in used)
    return replace(plan, graph=replace(plan.graph, models=kept))


def _merge_equal(plan: Plan) -> Plan:
    seen: dict[tuple[object, ...], str] = {}
    for node in plan.graph.nodes:
        if node.op.effect != "pure" or node.op.rows != "same":
            continue
        key = (
            node.op,
            node.inputs,
            repr(node.params),
            node.model,
            node.every,
            id(node.op.function),
        )
        first = seen.setdefault(key, node.name)
        if first != node.name:
            nodes = tuple(
                replace(
                    other,
                    inputs=tuple(
                        replace(b, source=first) if b.source == node.name else b
                        for b in other.inputs
                    ),
                )
                for other in plan.graph.nodes
                if other.name != node.name
            )
            text = f"{node.name} computes what {first} computes: done once"
            return _merge_equal(
                replace(plan, graph=replace(plan.graph, nodes=nodes)).noting("equal nodes", text)
            )
    return plan


def _first_unused(graph: Graph) -> Node | None:
    read = {source for node in graph.nodes for source in node.sources}
    for node in reversed(graph.nodes):
        if node.op.effect == "pure" and node.name not in read:
            return node
    return None


def _drop(plan: Plan, unused: Node) -> Plan:
    why = next(
        (
            f"{node.name} does not read {declined.field}: {declined.why}"
            for node in plan.graph.nodes
            for declined in node.declined
            if declined.source == unused.name
        ),
        "nobody reads what it makes",
    )
    nodes = tuple(node for node in plan.graph.nodes if node.name != unused.name)
    dropped = replace(plan, graph=replace(plan.graph, nodes=nodes))
    return dropped.noting("unused node", f"{unused.name} is dropped: {why}")


def bind(plan: Plan, context: Context) -> Plan:
    """Give every node a pool and, where it uses a model, an instance with a layout."""
    findings: list[Finding] = []
    chosen: dict[str, On] = {}
    for node in plan.graph.nodes:
        where = assignment(node, context.placement)
        if where is not None:
            chosen[node.name] = where
        elif node.model is not None:
            findings.append(_unplaced(node, plan, context.placement))
    if findings:
        raise PlanError(*findings)
    made = replace(plan, instances=_instances(plan, chosen))
    served = {
        serving_instance(made, node, chosen[node.name]).name
        for node in plan.graph.nodes
        if node.model is not None
    }
    instances = tuple(instance for instance in made.instances if instance.name in served)
    findings = _trained_twice(plan, instances)
    findings += [f for instance in instances for f in _layout_findings(instance, plan, context)]
    if findings:
        raise PlanError(*findings)
    parts = tuple(part for instance in instances for part in _parts(instance, context.costs))
    bound = replace(plan, instances=instances, parts=parts)
    actions = tuple(_run(node, chosen.get(node.name), bound, context) for node in plan.graph.nodes)
    return replace(bound, actions=actions)


def assignment(node: Node, placement: Placement) -> On | None:
    """The most specific assignment of a node: its name, model.use, model, then `*`.

    A node without a model runs on the host unless its name is assigned.
    """
    if node.name in placement.assign:
        return placement.assign[node.name]
    if node.model is None:
        return None
    for key in (f"{node.model}.{node.op.use}", node.model, "*"):
        if key in placement.assign:
            return placement.assign[key]
    return None


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
    return ["*", *declared, *uses, *(node.name for node in graph.nodes)]


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


def _instances(plan: Plan, chosen: dict[str, On]) -> tuple[Instance, ...]:
    """One instance per model, pool and layout; a rollout shares the trained one where it may."""
    instances: dict[str, Instance] = {}
    for model in plan.graph.models:
        nodes = [node for node in plan.graph.nodes if node.model == model.name]
        nodes.sort(key=lambda node: USES.index(node.op.use or "forward"))
        for node in nodes:
            made = _instance(node, chosen[node.name], plan, instances)
            known = instances.get(made.name)
            if known is not None and (known.fsdp, known.tp) != (made.fsdp, made.tp):
                raise PlanError(_two_layouts(node, made, known))
            uses = made.uses if known is None else tuple(dict.fromkeys((*known.uses, *made.uses)))
            instances[made.name] = replace(known or made, uses=uses)
    return tuple(instances.values())


def _instance(node: Node, where: On, plan: Plan, known: dict[str, Instance]) -> Instance:
    devices = plan.pools[where.pool]
    use = node.op.use or "forward"
    tp = where.tp or 1
    fsdp = where.fsdp or (1 if use == "rollout" else max(1, len(devices) // tp))
    name = f"{node.model}@{where.pool}"
    shared = known.get(name)
    alone = use == "rollout" and (
        where.weights == "own" or (shared is not None and (shared.fsdp, shared.tp) != (fsdp, tp))
    )
    if alone and where.weights != "shared":
        name = f"{name}/rollout"
    return Instance(
        name=name,
        model=str(node.model),
        pool=where.pool,
        devices=devices,
        uses=(use,),
        trained=use == "train",
        fsdp=fsdp,
        tp=tp,
    )


def _two_layouts(node: Node, made: Instance, known: Instance) -> Finding:
    return Finding(
        code="E216",
        what=f"{node.name} wants another layout of {made.name} than its other uses have",
        where=node.where,
        got=f"{made.layout()}; the others: {known.layout()}",
        expected="one layout for the uses of a model that share its weights on a pool",
        fix='rf.on(pool, weights="own") for a rollout, or a pool of its own',
    )


def _trained_twice(plan: Plan, instances: tuple[Instance, ...]) -> list[Finding]:
    """A finding for every model whose updates are placed on more than one pool."""
    findings = []
    for model in plan.graph.models:
        trained = [i.name for i in instances if i.trained and i.model == model.name]
        if len(trained) > 1:
            updates = plan.graph.updates(model.name)
            findings.append(
                Finding(
                    code="E215",
                    where=updates[1].where,
                    what=f"the updates of model {model.name!r} are placed on several pools",
                    got=f"trained: {', '.join(trained)}",
                    expected="one pool that holds the weights all of them write",
                    fix=f'"{model.name}.train": rf.on("{instances[0].pool}")',
                )
            )
    return findings


def _layout_findings(instance: Instance, plan: Plan, context: Context) -> list[Finding]:
    shape: Shape | None = context.costs.shapes[instance.model]
    model = plan.graph.model(instance.model)
    ranks, count = instance.fsdp * instance.tp, len(instance.devices)
    findings = []
    if count % ranks:
        findings.append(
            Finding(
                code="E212",
                where=model.where,
                what=f"{instance.name}: fsdp={instance.fsdp} x tp={instance.tp} does not fit "
                f"pool {instance.pool!r} of {count} devices",
                got=f"{count} % {ranks} = {count % ranks}",
            )
        )
        return findings
    if shape is not None and (shape.heads % instance.tp or shape.kv_heads % instance.tp):
        findings.append(
            Finding(
                code="E213",
                where=model.where,
                what=f"{instance.name}: tp={instance.tp} does not divide the heads of {model.path}",
                got=f"{shape.heads} heads, {shape.kv_heads} key-value heads",
            )
        )
    replicas = count // instance.tp
    for node in plan.graph.nodes:
        prompts = num_prompts(plan.graph, node) if node.model == instance.model else None
        parts = dict(node.params).get("mini_batches", 1)
        if prompts is not None and (prompts // parts) % replicas and replicas > 1:
            findings.append(
                Finding(
                    code="E214",
                    where=node.where,
                    what=f"{node.name}: {prompts // parts} prompts do not split over "
                    f"{replicas} ranks of pool {instance.pool!r}, groups kept whole",
                    expected=f"a multiple of {replicas}",
                )
            )
    return findings


def _parts(instance: Instance, costs: Costs) -> list[Part]:
    ranks = instance.fsdp * instance.tp

    def per_device(total: int | None) -> int | None:
        return None if total is None else -(-total // ranks)

    weights = Part(
        name=instance.weights,
        instance=instance.name,
        kind="weights",
        size=per_device(costs.weight_bytes(instance.model)),
        devices=instance.devices,
    )
    if not instance.trained:
        return [weights]
    moments = per_device(costs.optimizer_bytes(instance.model))
    return [
        weights,
        Part(
            name=instance.optimizer,
            instance=instance.name,
            kind="optimizer",
            size=moments,
            devices=instance.devices,
        ),
    ]


def serving_instance(plan: Plan, node: Node, where: On) -> Instance:
    """The instance that serves a node on the pool it is assigned to."""
    use = node.op.use
    candidates = [i for i in plan.instances if i.model == node.model and i.pool == where.pool]
    own = [i for i in candidates if i.name.endswith("/rollout")]
    if use == "rollout" and own:
        return own[0]
    return next(i for i in candidates if not i.name.endswith("/rollout"))


def _run(node: Node, where: On | None, plan: Plan, context: Context) -> Action:
    instance = serving_instance(plan, node, where) if where and node.model else None
    after = tuple(
        Dep(action=edge.source, distance=edge.distance, kind="data")
        for edge in plan.graph.edges
        if edge.target == node.name and edge.kind == "data"
    )
    needs: tuple[str, ...] = ()
    reads: tuple[tuple[str, int], ...] = ()
    writes: tuple[tuple[str, int], ...] = ()
    if instance is not None:
        needs = (instance.weights,)
        reads = ((instance.name, plan.graph.lag(node)),)
        if node.op.use == "train":
            needs = (instance.weights, instance.optimizer)
            writes = ((instance.name, -1),)
    pool = where.pool if where else "host"
    return Action(
        id=node.name,
        kind="run",
        node=node.name,
        pool=pool,
        devices=plan.pools[where.pool] if where else (HOST,),
        instance=instance.name if instance else None,
        reason=Reason(rule="declared", text=_as_declared(node)),
        after=after,
        needs=needs,
        reads=reads,
        writes=writes,
        cost=context.costs.run(node, instance),
        every=node.every,
        closing=node.op.closing,
    )


def _as_declared(node: Node) -> str:
    model = f"({node.model})" if node.model else ""
    period = f", every {node.every} iterations" if node.every != 1 else ""
    return (
        f"ops.{node.op.name}{model}{period}"
        if node.op.function is None
        else (f"{node.op.name}{model} of {node.op.function.__name__}{period}")
    )
