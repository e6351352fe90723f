"""Instances: which model is loaded on which pool in which layout, and the memory it takes.

Layouts that the placement leaves out are derived here; sizes that do not fit a model or
a pool are refused here. Time, rows and other instances' memory come later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Node
from rlflow.graph.model import Model, Muon
from rlflow.graph.op import Use
from rlflow.graph.placement import On, Recompute
from rlflow.graph.roles import Routed
from rlflow.modelfiles.families import (
    cutting_finding,
    dispatch_finding,
    packing_finding,
    sequence_finding,
    sharding_finding,
)
from rlflow.modelfiles.layouts.contexts import context_finding
from rlflow.modelfiles.layouts.stages import staging_finding
from rlflow.modelfiles.mixtures.routers import replay_finding, router_finding, width_finding
from rlflow.modelfiles.orthogonal import stacked_finding
from rlflow.scheduler.costs.distributions import EXPERTS
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import hosted_activations
from rlflow.scheduler.engines.engines import engine_parts
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.passes.bind.cuts import width_findings
from rlflow.scheduler.passes.bind.pictures import picture_findings
from rlflow.scheduler.passes.bind.pipelines import schedule_findings, scheduled
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.plan import MICRO_TOKENS, Instance, Part, Plan

Stays = Literal["layers", "optimizer"]
USES: tuple[Use, ...] = ("train", "forward", "rollout")


def make_instances(plan: Plan, chosen: dict[str, On]) -> tuple[Instance, ...]:
    """One instance per model, pool and layout; a rollout shares the trained one where it may.

    Raises PlanError where uses that share weights want different layouts.
    """
    instances: dict[str, Instance] = {}
    said: dict[str, list[tuple[Node, On]]] = {}
    for model in plan.graph.models:
        nodes = [node for node in plan.graph.nodes if node.model == model.name]
        nodes.sort(key=lambda node: USES.index(node.op.use or "forward"))
        for node in nodes:
            made = _instance(node, chosen[node.name], plan, instances)
            known = instances.get(made.name)
            if known is not None and sizes_of(known) != sizes_of(made):
                raise PlanError(two_layouts(node, made, made.layout(), known.layout()))
            if known is not None and known.options != made.options:
                told = [str(i.options and i.options.describe()) for i in (made, known)]
                raise PlanError(two_layouts(node, made, *told))
            uses = made.uses if known is None else tuple(dict.fromkeys((*known.uses, *made.uses)))
            instances[made.name] = replace(known or made, uses=uses)
            said.setdefault(made.name, []).append((node, chosen[node.name]))
    return tuple(_as_said(instance, said[name]) for name, instance in instances.items())


def _as_said(instance: Instance, said: list[tuple[Node, On]]) -> Instance:
    """The instance with what its uses say of recomputing and offloading; they have to agree.

    Only a backward recomputes: what updates say of it goes before what other uses say.
    """
    every = [(node, where.recompute) for node, where in said if where.recompute is not None]
    spoken = [each for each in every if each[0].op.use == "train"] or every
    for node, wanted in spoken:
        texts = f"recompute={wanted}", f"recompute={spoken[0][1]}"
        if len(set(texts)) > 1:
            raise PlanError(two_layouts(node, instance, *texts))
    learns = any(node.op.use == "train" and node.averages is None for node, _ in said)
    again = spoken[0][1] if learns and spoken else False
    asked = {each for _, where in said for each in where.offloads}
    states: tuple[Stays, ...] = ("layers", "optimizer") if learns else ("layers",)
    offload = next((each for each in states if each in asked), None)
    hosts = learns and "activations" in asked
    kept = learns and any(where.reshard_after_forward is False for _, where in said)
    shared = instance.shards > 1
    how = replace(recomputing(instance, again), offload=offload, kept_whole=kept and shared)
    how = scheduled(how, [where for _, where in said] if learns else [])
    how = replace(how, micro_tokens=min([MICRO_TOKENS, *(w.micro for _, w in said if w.micro)]))
    compiled = set(instance.uses) != {"rollout"} and any(where.compile for _, where in said)
    return replace(how, hosts_activations=hosts, compiled=compiled, tf32=_tf32_uses(instance, said))


def _tf32_uses(instance: Instance, said: list[tuple[Node, On]]) -> tuple[Use, ...]:
    """The uses that multiply by TF32; all nodes of a use have to agree."""
    by_use: dict[Use, bool] = {}
    for node, where in said:
        wanted, use = bool(where.tf32), node.op.use or "forward"
        if by_use.setdefault(use, wanted) != wanted:
            texts = f"tf32={wanted}", f"tf32={not wanted}"
            raise PlanError(two_layouts(node, instance, *texts))
    return tuple(use for use in USES if by_use.get(use))


def said_of_sequence(instance: Instance, said: Sequence[tuple[Node, On]]) -> bool | None:
    """Whether uses beside rollouts say that ranks share the sequence; PlanError unless they agree.

    Only what goes over whole rows has a sequence to share.
    """
    spoken = [
        (node, where.sequence)
        for node, where in said
        if where.sequence is not None and node.op.use != "rollout"
    ]
    for node, wanted in spoken:
        if wanted is not spoken[0][1]:
            texts = f"sequence={wanted}", f"sequence={spoken[0][1]}"
            raise PlanError(two_layouts(node, instance, *texts))
    return spoken[0][1] if spoken else None


def recomputing(instance: Instance, again: Recompute) -> Instance:
    """An instance that computes layers again as a placement says it."""
    if isinstance(again, bool | str):
        return replace(instance, recompute=again, recompute_first=None)
    return replace(instance, recompute=False, recompute_first=again)


class AxisSizes(NamedTuple):
    """How many ranks share parameters, layers, experts, rows' tokens; stages, and those of each."""

    fsdp: int
    tp: int
    ep: int
    cp: int
    pp: int
    virtual: int


def layout_of(where: On, use: Use, pools: Mapping[str, tuple[int, ...]]) -> AxisSizes:
    """Along which axis how many ranks share a use. A rollout's rows are whole, and in one stage.

    One whose `fsdp` is left out has whole layers, and experts with them.
    """
    tp, ep, cp, pp = where.tp or 1, where.ep or 1, where.cp or 1, where.pp or 1
    if use == "rollout":
        return AxisSizes(where.fsdp or 1, tp, 1 if where.fsdp is None else ep, 1, 1, 1)
    left = 1 if "layers" in where.offloads else max(1, len(pools[where.pool]) // (tp * cp * pp))
    return AxisSizes(where.fsdp or left, tp, ep, cp, pp, where.virtual or 1)


def sizes_of(instance: Instance) -> AxisSizes:
    """The same of an instance."""
    return AxisSizes(*(getattr(instance, axis) for axis in AxisSizes._fields))


def instance_of(node: Node, where: On, pools: Mapping[str, tuple[int, ...]]) -> Instance:
    """The instance that a node would have with nothing else on its pool."""
    use = node.op.use or "forward"
    sizes = layout_of(where, use, pools)
    return Instance(
        name=f"{node.model}@{where.pool}",
        model=str(node.model),
        pool=where.pool,
        devices=pools[where.pool],
        uses=(use,),
        trained=use == "train",
        **sizes._asdict(),
        options=where.options,
    )


def _instance(node: Node, where: On, plan: Plan, known: dict[str, Instance]) -> Instance:
    made = instance_of(node, where, plan.pools)
    if made.engine_plan.own_process:
        return replace(made, name=f"{made.name}{made.engine_plan.suffix}")
    shared = known.get(made.name)
    apart = node.op.use == "rollout" and (
        where.weights == "own" or (shared is not None and sizes_of(shared) != sizes_of(made))
    )
    if apart and where.weights != "shared":
        return replace(made, name=f"{made.name}/rollout")
    return made


def two_layouts(node: Node, instance: Instance, wanted: str, known: str) -> Finding:
    """E216: uses that share weights and do not agree on their layout."""
    return Finding(
        code="E216",
        what=f"{node.name} wants another layout of {instance.name} than its other uses have",
        where=node.where,
        got=f"{wanted}; the others: {known}",
        expected="one layout for the uses of a model that share its weights on a pool",
        fix='rf.on(pool, weights="own") for a rollout, or a pool of its own',
    )


def trained_twice(plan: Plan, instances: tuple[Instance, ...]) -> list[Finding]:
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


def pool_findings(instance: Instance, plan: Plan) -> list[Finding]:
    """A finding where an instance's ranks do not divide its pool: it has no rank to size then."""
    count, ranks = len(instance.devices), instance.ranks
    if count % ranks == 0:
        return []
    sizes = {"pp": instance.pp, "fsdp": instance.fsdp, "cp": instance.cp, "tp": instance.tp}
    said = [f"{a}={size}" for a, size in sizes.items() if a in ("fsdp", "tp") or size > 1]
    return [
        Finding(
            code="E212",
            where=plan.graph.model(instance.model).where,
            what=f"{instance.name}: {' x '.join(said)} does not fit "
            f"pool {instance.pool!r} of {count} devices",
            got=f"{count} % {ranks} = {count % ranks}",
        )
    ]


def layout_findings(instance: Instance, plan: Plan, costs: Costs) -> list[Finding]:
    """What is wrong with an instance's layout: for its pool, for its model, for its use."""
    wrong_pool = pool_findings(instance, plan)
    if wrong_pool:
        return wrong_pool
    model = plan.graph.model(instance.model)
    findings = _offload_findings(instance, plan) if instance.offload == "layers" else []
    cut = max(instance.tp, instance.ep, instance.cp, instance.pp) > 1
    if instance.compiled and (cut or instance.offload == "layers"):
        findings.append(_not_compiled(instance, plan))
    findings += picture_findings(instance, plan, costs) + schedule_findings(instance, plan, costs)
    if (shape := costs.shapes[instance.model]) is None:
        return findings
    if (instance.recompute_first or 0) > shape.layers:
        findings.append(
            Finding(
                code="E253",
                where=model.where,
                what=f"{instance.name} recomputes {instance.recompute_first} layers, and "
                f"{model.path} has {shape.layers}",
                expected="how many of the first layers, or True for all",
                fix=f'rf.on("{instance.pool}", recompute=True)',
            )
        )
    if not instance.engine_plan.in_process:
        found = _uncomputed(instance, model, shape, plan.graph.nodes)
        refused = [replace(each, where=model.where) for each in found]
        if refused:
            return refused
    return findings + width_findings(instance, model, shape)


def _uncomputed(
    instance: Instance, model: Model, shape: Shape, nodes: Sequence[Node]
) -> list[Finding]:
    """What keeps the engines of this process from computing a model in its layout."""
    found = [packing_finding(model.path, shape.family)]
    shared: Finding | None = None
    if len(instance.devices) > 1:
        cut = instance.tp > 1 and cutting_finding(model.path, shape.family, shape.kind)
        sizes = (shape.experts, instance.shards, instance.tp)
        shared = cut or sharding_finding(model.path, shape.family, *sizes)
        unshared = sequence_finding(model.path, shape.family) if instance.sequence else None
        found += [shared, unshared]
    found.append(None if shared else _undispatched(instance, model, shape))
    apart = (shape.heads, instance.cp, instance.tp, instance.cp_by, shape.carrying)
    found.append(context_finding(model.path, shape.family, *apart, windows=shape.windows))
    stages = (shape.layers, instance.pp, instance.virtual)
    found.append(staging_finding(model.path, shape.family, *stages))
    if isinstance(model.optimizer, Muon) and shape.family.experts != "none":
        found.append(stacked_finding(model.path))
    if model.router is not None:
        corrected = bool(model.router.bias_rate)
        found.append(router_finding(model.path, shape.kind, corrected=corrected))
    found += _misrouted(model, shape, [node for node in nodes if node.model == model.name])
    return [finding for finding in found if finding is not None]


def _misrouted(model: Model, shape: Shape, nodes: Sequence[Node]) -> list[Finding | None]:
    """What keeps the routers of a model from telling, or choosing, what its nodes want of them."""
    routed = [node for node in nodes if node.role(Routed)]
    fields = [bound.field for node in routed for bound in node.inputs]
    wide = {field.width for field in fields if field.dtype == EXPERTS and field.width}
    others = sorted(width for width in wide if width and width != shape.routed)
    refused = replay_finding(model.path, shape.kind) if routed else None
    if refused is not None or not others:
        return [refused]
    return [width_finding(model.path, width, shape.routed) for width in others]


def _undispatched(instance: Instance, model: Model, shape: Shape) -> Finding | None:
    """What keeps tokens of a model from experts on other ranks, and the line that works."""
    sizes = (instance.ep, instance.shards, instance.tp)
    found = dispatch_finding(model.path, shape.family, shape.experts, *sizes)
    if found is None:
        return None
    return replace(found, fix=found.fix.replace("...", f'"{instance.pool}"', 1))


def _offload_findings(instance: Instance, plan: Plan) -> list[Finding]:
    """Layers come and go on one device, and what they hold is never written."""
    updates = plan.graph.updates(instance.model)
    if updates:
        return [
            Finding(
                code="E218",
                where=updates[0].where,
                what=f"{instance.name} is kept on the host layer by layer, and "
                f"{updates[0].name} changes the model",
                expected='offload="layers" for a model that nothing updates',
                fix=f'rf.on("{instance.pool}")',
            )
        ]
    if instance.ranks > 1:
        return [
            Finding(
                code="E218",
                where=plan.graph.model(instance.model).where,
                what=f"{instance.name} is kept on the host layer by layer and shared by ranks",
                got=instance.layout(),
                expected="each rank brings whole layers in: fsdp=1, tp=1",
                fix=f'rf.on("{instance.pool}", offload="layers")',
            )
        ]
    return []


def _not_compiled(instance: Instance, plan: Plan) -> Finding:
    """Layers that are cut, or whose weights come and go while they compute."""
    return Finding(
        code="E254",
        where=plan.graph.model(instance.model).where,
        what=f"the layers of {instance.name} cannot be compiled",
        got=instance.layout(),
        expected="layers that each rank computes whole, from weights that stay while it does",
        fix=f'rf.on("{instance.pool}", compile=True) without tp=, ep=, cp=, pp=, offload="layers"',
    )


def memory_parts(instance: Instance, nodes: Sequence[Node], costs: Costs) -> list[Part]:
    """The memory of an instance that can sleep, each part by itself; it serves `nodes`."""
    if instance.engine_plan.in_process:
        return engine_parts(instance, nodes, costs)
    weights = Part(
        name=instance.weights,
        instance=instance.name,
        kind="weights",
        size=costs.weights(instance),
        devices=instance.devices,
    )
    if not instance.trained or costs.graph.model(instance.model).averaged:
        return [weights]
    gradients = replace(
        weights, name=instance.gradients, kind="gradients", size=costs.gradients(instance)
    )
    optimizer = replace(
        weights,
        name=instance.optimizer,
        kind="optimizer",
        size=costs.moments(instance),
        on_host=costs.hosted(instance) or 0,
    )
    if not instance.hosts_activations:
        return [weights, gradients, optimizer]
    size = hosted_activations(instance, nodes, costs)
    held = replace(weights, name=instance.activations, kind="activations", size=size and 0)
    return [weights, gradients, optimizer, replace(held, on_host=size or 0)]


def serving_instance(plan: Plan, node: Node, where: On) -> Instance:
    """The instance that serves a node on the pool it is assigned to."""
    use, engine = node.op.use, EnginePlan.chosen(where).name
    candidates = [
        i
        for i in plan.instances
        if i.model == node.model
        and i.pool == where.pool
        and i.engine == engine
        and not i.engine_plan.lies_inside
    ]
    own = [i for i in candidates if i.name.endswith("/rollout")]
    if use == "rollout" and own:
        return own[0]
    return next(i for i in candidates if not i.name.endswith("/rollout"))
