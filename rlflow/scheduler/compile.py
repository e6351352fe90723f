"""`compile_plan`: the passes in their order, with the verifier after each.

A pass is a pure function `(Plan, Context) -> Plan`. This file knows their order and
nothing of what they do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlflow.errors import Finding, InvariantError, PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import Placement
from rlflow.scheduler.averages import model_findings
from rlflow.scheduler.bind import bind, unknown_assignments
from rlflow.scheduler.cluster import Cluster, mixed_pools
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs import Costs
from rlflow.scheduler.order import chain, order, timing
from rlflow.scheduler.pause import pause
from rlflow.scheduler.plan import Backend, Plan
from rlflow.scheduler.residency import residency
from rlflow.scheduler.rewrite import rewrite
from rlflow.scheduler.rewrite.beside import rewards_beside
from rlflow.scheduler.shapes import Shape, model_shape, stand_ins
from rlflow.scheduler.staleness import allowed, note_turns, stamp
from rlflow.scheduler.stream import choose, stream
from rlflow.scheduler.text import numbers
from rlflow.scheduler.tokenizers import tokenizer_findings
from rlflow.scheduler.transfer import transfer
from rlflow.scheduler.unroll import unroll
from rlflow.scheduler.verify import verify
from rlflow.scheduler.vocabularies import vocabulary_findings
from rlflow.scheduler.weights import weights

Pass = Callable[[Plan, Context], Plan]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("pause", pause),
    ("stamp", stamp),
    ("rewrite", rewrite),
    ("unroll", unroll),
    ("bind", bind),
    ("stream", stream),
    ("weights", weights),
    ("transfer", transfer),
    ("order", order),
    ("residency", residency),
    ("chain", chain),
    ("timing", timing),
    ("notes", lambda plan, context: rewards_beside(note_turns(plan, context), context)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A plan, and what it was after every pass."""

    plan: Plan
    stages: tuple[tuple[str, Plan], ...]


def compile_plan(
    graph: Graph,
    placement: Placement,
    cluster: Cluster,
    *,
    name: str = "placement",
    near: Path | None = None,
    backend: Backend | None = None,
    costs: Costs | None = None,
    verified: bool = True,
    optimize: float = 0.0,
) -> Compiled:
    """Compile a graph under a placement for a cluster.

    Without a `backend` the plan is for this process where its pools are CPU devices, one
    each, and for Ray otherwise. With `costs` of this graph and cluster no model's files are
    read; a plan that is not `verified` is for comparing, not for running. An exact solver gets
    `optimize` seconds to improve the order. Raises PlanError where the placement does not fit,
    with every finding; UsageError where a model's files are missing, or a solver; InvariantError
    where a pass breaks an invariant.
    """
    if placement.num_devices() > cluster.count:
        raise PlanError(_too_few_devices(placement, cluster, name))
    findings = [*unknown_assignments(graph, placement), *_not_compiled(placement, name)]
    findings += mixed_pools(placement.devices(), cluster)
    if backend == "local":
        findings += not_local(placement, cluster)
    if findings:
        raise PlanError(*findings)
    chosen: Backend = backend or ("ray" if not_local(placement, cluster) else "local")
    if costs is None:
        shapes: dict[str, Shape | None] = {m.name: model_shape(m, near) for m in graph.models}
        costs = Costs(graph=graph, cluster=cluster, shapes=shapes)
        findings = [*tokenizer_findings(graph, near), *model_findings(graph, shapes, near)]
        findings += vocabulary_findings(graph, shapes)
        if findings:
            raise PlanError(*findings)
    staleness = allowed(graph, placement)
    context = Context(
        placement=placement,
        cluster=cluster,
        costs=replace(costs, backend=chosen, staleness=staleness),
        optimize=optimize,
    )
    plan = Plan(
        graph=replace(graph, staleness=staleness),
        placement=name,
        cluster=cluster.describe(),
        budgets=cluster.budgets(),
        backend=chosen,
        staleness=staleness,
        pools=placement.devices(),
        hosts=cluster.hosts,
        host_starts=cluster.host_starts,
    )
    plan = _noting_devices(plan, placement, cluster, chosen=backend is None)
    if placement.stream == "auto":
        return _streamed(plan, context, verified=verified)
    return _compiled(plan, replace(context, chunks=placement.stream), verified=verified)


def _compiled(
    plan: Plan,
    context: Context,
    passes: Sequence[tuple[str, Pass]] = PASSES,
    *,
    verified: bool,
) -> Compiled:
    """The plan after some passes, with the verifier after each where it is wanted.

    Each pass finds the costs of the graph that the plan before it runs.
    """
    stages = []
    for title, run in passes:
        plan = run(plan, replace(context, costs=replace(context.costs, graph=plan.graph)))
        broken = verify(plan, stage=title) if verified else []
        if broken:
            raise InvariantError(
                *(Finding(code="E901", what=f"after pass {title!r}: {text}") for text in broken),
                summary="This is a bug in rlflow: it refuses to run a plan it cannot prove.",
            )
        stages.append((title, plan))
    return Compiled(plan=plan, stages=tuple(stages))


def _streamed(plan: Plan, context: Context, *, verified: bool) -> Compiled:
    """The plan with as many chunks as shorten the estimated iteration."""
    cut = [title for title, _ in PASSES].index("stream")
    bound = _compiled(plan, context, PASSES[:cut], verified=verified)

    def made_in(chunks: int, optimize: float) -> Compiled:
        chunked = replace(context, chunks=chunks, optimize=optimize)
        return _compiled(bound.plan, chunked, PASSES[cut:], verified=verified)

    planned = functools.cache(lambda chunks: made_in(chunks, 0.0))
    chunks, why = choose(bound.plan, lambda count: planned(count).plan)
    made = made_in(chunks, context.optimize) if context.optimize else planned(chunks)
    plan = made.plan.noting("stream", why)
    stages = (*bound.stages, *made.stages[:-1], (made.stages[-1][0], plan))
    return Compiled(plan=plan, stages=stages)


def _not_compiled(placement: Placement, name: str) -> list[Finding]:
    """A finding for what a placement may say and this compiler does not honour."""
    findings = []
    if "host" in placement.pools:
        findings.append(
            Finding(
                code="E217",
                what=f"placement {name!r} names a pool 'host'",
                expected="another name: the host is where ops without a model run",
            )
        )
    return findings


def _noting_devices(plan: Plan, placement: Placement, cluster: Cluster, *, chosen: bool) -> Plan:
    """What the devices mean for the plan: why it is for Ray, how many cores are shared."""
    reasons = not_local(placement, cluster)
    if chosen and reasons:
        plan = plan.noting("backend ray", f"one process a device: {reasons[0].got}")
    if cluster.cores:
        text = f"{cluster.count} CPU devices share {cluster.cores} cores"
        plan = plan.noting("shared cores", text)
    for text in stand_ins(plan.graph.models):
        plan = plan.noting("model shape", text)
    return plan


def not_local(placement: Placement, cluster: Cluster) -> list[Finding]:
    """Why one process cannot run it: a pool of several devices, or devices of another kind."""
    pools = [
        f"pool {name!r} has {len(devices)} devices"
        for name, devices in placement.devices().items()
        if len(devices) > 1
    ]
    named = " and ".join(dict.fromkeys(kind.name for kind, _ in cluster.kinds))
    kinds = [] if cluster.is_cpu else [f"the devices are {named}"]
    if not pools and not kinds:
        return []
    return [
        Finding(
            code="E403",
            what="the local backend runs CPU pools of one device each",
            got=", ".join([*kinds, *pools]),
            expected="one CPU device a pool, or a process for every device",
            fix="--backend ray",
        )
    ]


def _too_few_devices(placement: Placement, cluster: Cluster, name: str) -> Finding:
    placed = placement.devices().items()
    pools = ", ".join(f"{pool} [{numbers(devices)}]" for pool, devices in placed)
    return Finding(
        code="E203",
        what=f"placement {name!r} needs {placement.num_devices()} devices, there are "
        f"{cluster.count}",
        got=f"pools: {pools}",
        expected=f"at most {cluster.count} of {cluster.describe()}",
        fix=f"--devices {cluster.kind.name}:{placement.num_devices()}",
    )


def dump_plan(plan: Plan) -> str:
    """The plan as JSON text, stable to the byte."""
    document = {"hash": plan.hash, **plan.to_json(), "declared": asdict_graph(plan)}
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def asdict_graph(plan: Plan) -> dict[str, object]:
    """The graph the plan runs, as plain data."""
    return dict(plan.graph.to_json())
