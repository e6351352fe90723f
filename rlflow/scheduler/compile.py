"""`compile_plan`: the passes in their order, with the verifier after each.

A pass is a pure function `(Plan, Context) -> Plan`. This file knows their order and
nothing of what they do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlflow.errors import Finding, InvariantError, PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import Placement
from rlflow.scheduler.bind import bind, unknown_assignments
from rlflow.scheduler.cluster import Cluster
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs import Costs
from rlflow.scheduler.order import chain, order, timing
from rlflow.scheduler.plan import Backend, Plan
from rlflow.scheduler.residency import residency
from rlflow.scheduler.rewrite import rewrite
from rlflow.scheduler.shapes import Shape, model_shape
from rlflow.scheduler.transfer import transfer
from rlflow.scheduler.verify import verify
from rlflow.scheduler.weights import weights

Pass = Callable[[Plan, Context], Plan]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("rewrite", rewrite),
    ("bind", bind),
    ("weights", weights),
    ("transfer", transfer),
    ("order", order),
    ("residency", residency),
    ("chain", chain),
    ("timing", timing),
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
) -> Compiled:
    """Compile a graph under a placement for a cluster.

    Without a `backend` the plan is for this process where its pools are CPU devices, one
    each, and for Ray otherwise. Raises PlanError where the placement does not fit, with every
    finding; UsageError where a model's files are missing; InvariantError where a pass breaks
    an invariant.
    """
    if placement.num_devices() > cluster.count:
        raise PlanError(_too_few_devices(placement, cluster, name))
    findings = [*unknown_assignments(graph, placement), *_not_compiled(placement, name)]
    if backend == "local":
        findings += not_local(placement, cluster)
    if findings:
        raise PlanError(*findings)
    shapes: dict[str, Shape | None] = {m.name: model_shape(m, near) for m in graph.models}
    context = Context(
        placement=placement,
        cluster=cluster,
        costs=Costs(graph=graph, cluster=cluster, shapes=shapes),
    )
    plan = Plan(
        graph=replace(graph, staleness=placement.staleness),
        placement=name,
        cluster=cluster.describe(),
        budgets=cluster.budgets(),
        backend=backend or ("ray" if not_local(placement, cluster) else "local"),
        staleness=placement.staleness,
        pools=placement.devices(),
        hosts=cluster.hosts,
    )
    plan = _noting_devices(plan, placement, cluster, chosen=backend is None)
    stages = []
    for title, run in PASSES:
        plan = run(plan, context)
        broken = verify(plan, stage=title)
        if broken:
            raise InvariantError(
                *(Finding(code="E901", what=f"after pass {title!r}: {text}") for text in broken),
                summary="This is a bug in rlflow: it refuses to run a plan it cannot prove.",
            )
        stages.append((title, plan))
    return Compiled(plan=plan, stages=tuple(stages))


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
    return plan


def not_local(placement: Placement, cluster: Cluster) -> list[Finding]:
    """Why one process cannot run it: a pool of several devices, or devices of another kind."""
    pools = [
        f"pool {name!r} has {len(devices)} devices"
        for name, devices in placement.devices().items()
        if len(devices) > 1
    ]
    kinds = [] if cluster.is_cpu else [f"the devices are {cluster.kind.name}"]
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
    pools = ", ".join(f"{pool} {list(devices)}" for pool, devices in placement.devices().items())
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
