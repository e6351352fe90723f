"""Where drafters lie: whole, on the devices of the rollouts that they propose tokens for.

A rollout reads the weights of its drafter beside its own. Where it runs in an engine of its own,
the drafter lies in that. This file knows no passes, and not what a drafter proposes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.graph import Node
from rlflow.graph.placement import On
from rlflow.graph.roles import Drafted, SamplingOptions
from rlflow.modelfiles.families import undrafted
from rlflow.scheduler.costs.drafting import models_in
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.plan import Instance, Plan


def with_drafters(
    instances: Sequence[Instance], plan: Plan, chosen: Mapping[str, On]
) -> tuple[Instance, ...]:
    """The instances, and one of each drafter on every pool that it drafts on."""
    found = {instance.name: instance for instance in instances}
    for node, role in plan.graph.having(Drafted):
        where = chosen[node.name]
        pool, engine = where.pool, EnginePlan.chosen(where)
        name = drafting_name(node, pool, engine)
        known = found.get(name)
        if engine.own_process:
            host = found[f"{node.model}@{pool}{engine.suffix}"]
            found[host.name] = replace(host, drafter=role.by, draft_tokens=role.tokens)
            found[name] = Instance(
                name=name,
                model=role.by,
                pool=pool,
                devices=host.devices,
                uses=("rollout",),
                trained=False,
                tp=host.tp,
                inside=host.name,
            )
        elif known is None:
            found[name] = Instance(
                name=name,
                model=role.by,
                pool=pool,
                devices=plan.pools[pool],
                uses=("rollout",),
                trained=False,
            )
        else:
            found[name] = replace(known, uses=tuple(dict.fromkeys((*known.uses, "rollout"))))
    return tuple(found.values())


def drafting_name(node: Node, pool: str, engine: EnginePlan) -> str:
    """The name of the instance of a rollout's drafter, by the rollout's pool and engine."""
    lies = f"{engine.suffix}/{node.model}" if engine.own_process else ""
    return f"{node.drafter}@{pool}{lies}"


def drafting_instance(plan: Plan, node: Node, served: Instance) -> Instance:
    """The instance of the drafter of a rollout that is served by another instance."""
    return plan.instance(drafting_name(node, served.pool, served.engine_plan))


def drafter_findings(
    plan: Plan,
    instances: Sequence[Instance],
    served: Mapping[str, Sequence[Node]],
    shapes: Mapping[str, Shape | None],
) -> list[Finding]:
    """E261 for every rollout here whose weights or whose drafter's are cut over ranks.

    E598 where layers of one of the two carry states. `served` has the nodes of each instance;
    rollouts in engines of their own are left out.
    """
    findings = []
    of = {node.name: i for i in instances for node in served[i.name] if node.model == i.model}
    for node, role in plan.graph.having(Drafted):
        if of[node.name].engine_plan.own_process:
            continue
        beside = drafting_instance(plan, node, of[node.name])
        for name in (of[node.name].model, beside.model):
            shape = shapes[name]
            if shape is not None and shape.family.attention == "hybrid":
                findings.append(replace(undrafted(f"model {name!r}"), where=node.where))
        cut = [f"{i.name}: {i.layout()}" for i in (of[node.name], beside) if i.ranks > 1]
        if cut:
            findings.append(
                Finding(
                    code="E261",
                    what=f"{node.name}: a drafter proposes tokens where both models lie whole in "
                    "one process",
                    where=node.where,
                    got=", ".join(cut),
                    expected="the embedded engine and no fsdp or tp for the rollout",
                    fix=f'"{role.by}": rf.on(pool, fsdp=1)',
                )
            )
    return findings


def drafts_findings(engine: Instance, nodes: Sequence[Node], costs: Costs) -> Iterator[Finding]:
    """E264, E630, E638, E639 and E678 for the rollouts of an engine that drafts."""
    options = engine.engine_plan.settings
    if engine.engine_plan.has_drafter:
        yield from _together(engine, nodes, costs)
    on_cpu = costs.cluster.kind_of(engine.devices[0]).name == "cpu"
    for node in nodes:
        sampling = node.role(SamplingOptions) or SamplingOptions()
        temperature = float(sampling.temperature or 0)
        why = options.distorted(temperature, on_cpu=on_cpu)
        if why:
            yield _distorted(engine, node, temperature, why)


def _together(engine: Instance, nodes: Sequence[Node], costs: Costs) -> Iterator[Finding]:
    """What keeps a drafter from lying in an engine beside its model."""
    found = ((node, node.role(Drafted)) for node in nodes)
    drafted = [(node, role) for node, role in found if role is not None]
    said = {f"{role.by} (draft_tokens={role.tokens})": node for node, role in drafted}
    title = engine.engine_plan.settings.title
    if len(said) > 1:
        yield Finding(
            code="E638",
            what=f"{engine.name} is to draft in several ways, and {title} has one for all rows",
            where=list(said.values())[1].where,
            got=", ".join(said),
            expected="one drafter and one number of draft_tokens for the rollouts of an engine",
            fix="the same drafter= and draft_tokens=, or a pool of its own for one rollout",
        )
    yield from (_always(engine, node, role) for node, role in drafted if role.rows is not None)
    unlike = list(_unlike(engine, costs))
    if unlike:
        yield Finding(
            code="E639",
            what=f"drafter {engine.drafter!r} cannot lie in {title} beside {engine.model!r}",
            where=drafted[0][0].where,
            got=", ".join(unlike),
            expected="the policy's dtype and size of vocabulary, trained as a whole",
            fix=f'"{engine.model}.rollout": rf.on("{engine.pool}")',
        )
    if engine.engine_plan.drafts_by_options:
        yield Finding(
            code="E678",
            what=f"{engine.name} is to draft with {engine.drafter!r} and by its options",
            where=drafted[0][0].where,
            got="drafter= of the rollout and speculative= of the engine",
            expected="one of them",
            fix=f'"{engine.model}.rollout": rf.on("{engine.pool}", engine="{engine.engine}")',
        )


def _always(engine: Instance, node: Node, role: Drafted) -> Finding:
    """An engine drafts in every turn, however many rows go on.

    SGLang 0.5.23 chooses drafts by the rows of a batch (`--speculative-adaptive`) for EAGLE and
    EAGLE3 alone, not for a model of its own (`adaptive_unsupported_reason`).
    """
    title = engine.engine_plan.settings.title
    return Finding(
        code="E264",
        what=f"{node.name}: {title} lets a drafter draft in every turn",
        where=node.where,
        got=f"draft_rows={role.rows}",
        expected=f"no draft_rows with {title}, or the embedded engine",
        fix=f'"{engine.model}.rollout": rf.on("{engine.pool}")',
    )


def _unlike(engine: Instance, costs: Costs) -> Iterator[str]:
    """What keeps a drafter from lying beside a model."""
    mine, theirs = (costs.graph.model(each.model) for each in models_in(engine))
    if theirs.dtype != mine.dtype:
        yield f"dtype {theirs.dtype}, the policy's is {mine.dtype}"
    if theirs.lora is not None:
        yield "adapters (lora=)"
    if mine.lora is not None:
        yield "adapters (lora=) of the policy"
    if theirs.freeze:
        yield "frozen parts (freeze=)"
    shape, other = (costs.shapes[each.model] for each in models_in(engine))
    if shape is not None and other is not None and other.vocab != shape.vocab:
        yield f"a vocabulary of {other.vocab}, the policy's is {shape.vocab}"


def _distorted(engine: Instance, node: Node, temperature: float, why: str) -> Finding:
    by_model = engine.engine_plan.has_drafter
    who, drafts = (repr(engine.drafter), "drafts") if by_model else ("its options", "draft")
    beside = "" if node.role(Drafted) else f", since {who} {drafts} for all of {engine.name}"
    return Finding(
        code="E630",
        what=f"{node.name}: with a drafter what is sampled would be wrong{beside}: {why}",
        where=node.where,
        got=f"temperature={temperature:g}",
        expected="temperature=0, or the embedded engine, whose tokens no drafter changes",
        fix=f'"{engine.model}.rollout": rf.on("{engine.pool}")',
    )
