"""`compile_plan`: the passes in their order, with the verifier after each.

A pass is a pure function `(Plan, Context) -> Plan`. This file knows their order and
nothing of what they do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlflow.errors import Finding, InvariantError, PlanError, UsageError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import Placement
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.origins import Prompts
from rlflow.scheduler.costs.rows.assumptions import seconds_rest_on
from rlflow.scheduler.costs.rows.given import check_lengths
from rlflow.scheduler.devices.cluster import Cluster, mixed_pools
from rlflow.scheduler.devices.hardware import TAKEN_FOR_GRANTED
from rlflow.scheduler.models.contexts import length_findings
from rlflow.scheduler.models.heads import head_findings, head_notes
from rlflow.scheduler.models.routing import with_widths
from rlflow.scheduler.models.shapes import Shape, model_shape, stand_ins
from rlflow.scheduler.models.tokenizers import missing_tokenizers, tokenizer_findings
from rlflow.scheduler.models.vocabularies import vocabulary_findings
from rlflow.scheduler.passes.bind.averages import model_findings
from rlflow.scheduler.passes.bind.bind import bind, unknown_assignments
from rlflow.scheduler.passes.bind.whole_layers import (
    by_tables,
    choosing,
    estimated_period,
    faster_whole,
    whole_text,
)
from rlflow.scheduler.passes.continuous import continuous
from rlflow.scheduler.passes.drafted import draft_few
from rlflow.scheduler.passes.order import chain, order, timing
from rlflow.scheduler.passes.oversample import oversample
from rlflow.scheduler.passes.pause import pause
from rlflow.scheduler.passes.portions import portions, with_shares_found
from rlflow.scheduler.passes.residency import residency
from rlflow.scheduler.passes.rewrite import rewrite
from rlflow.scheduler.passes.rewrite.overlap import rewards_beside
from rlflow.scheduler.passes.staleness import allowed, note_turns, stamp
from rlflow.scheduler.passes.stream.reasons import groups_do_not_fit, rows_are_shorter
from rlflow.scheduler.passes.stream.stream import choose_chunks, stream
from rlflow.scheduler.passes.too_large import rooms_left
from rlflow.scheduler.passes.transfer import transfer
from rlflow.scheduler.passes.unroll import unroll
from rlflow.scheduler.passes.weights import weights
from rlflow.scheduler.plan.plan import Backend, Instance, Plan
from rlflow.scheduler.plan.state_notes import memory_notes
from rlflow.scheduler.plan.text import numbers
from rlflow.scheduler.verify.verify import verify

Pass = Callable[[Plan, Context], Plan]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("portions", portions),
    ("pause", lambda plan, context: continuous(pause(plan, context), context)),
    ("stamp", stamp),
    ("rewrite", rewrite),
    ("unroll", unroll),
    ("bind", lambda plan, context: draft_few(oversample(bind(plan, context), context), context)),
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

    def noting(self, rule: str, text: str) -> Compiled:
        """The same with one more note on the plan."""
        return self._with(self.plan.noting(rule, text))

    def resting_on(self, costs: Costs) -> Compiled:
        """The same with the words for what its seconds rest on, where it has any."""
        if self.plan.timing is None:
            return self
        known = replace(costs, graph=self.plan.graph)
        return self._with(replace(self.plan, inputs=seconds_rest_on(self.plan, known)))

    def _with(self, plan: Plan) -> Compiled:
        return Compiled(plan=plan, stages=(*self.stages[:-1], (self.stages[-1][0], plan)))


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
    notes: Sequence[tuple[str, str]] = (),
    groups: bool | None = None,
) -> Compiled:
    """Compile a graph under a placement for a cluster.

    Without a `backend` the plan is for this process where its pools are CPU devices, one
    each, and for Ray otherwise. Pools in shares take theirs of the cluster's devices. With `costs`
    of this graph and cluster no model's files are read; a plan that is not `verified` is for
    comparing, not for running. An exact solver gets `optimize` seconds to improve the order, and
    as many for it and the residency; `notes`, a rule and a text each, come first in the plan.
    Chunks are of complete `groups` or of rows as that says, where it is None of what is shorter.
    Raises PlanError with every finding where the placement does not fit, UsageError where a model's
    files or a solver are missing, InvariantError for a bug.
    """
    placement = placement.at(cluster.count, name, cluster.kind.name)
    _require_room(graph, placement, cluster, name, local=backend == "local")
    chosen: Backend = backend or ("ray" if not_local(placement, cluster) else "local")
    if costs is None:
        shapes = _checked_shapes(graph, near)
        costs = Costs(graph=graph, cluster=cluster, shapes=shapes, prompts=Prompts(near))
        check_lengths(graph)
    graph, staleness = with_widths(graph, costs.shapes), allowed(graph, placement)
    context = Context(
        placement=placement,
        cluster=cluster,
        costs=replace(costs, graph=graph, backend=chosen, staleness=staleness),
        optimize=optimize,
        rough=not verified,
        groups=groups,
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
    plan = _noting_graph(plan, notes, near)
    made = _shared_out(plan, context, verified=verified)
    return made.resting_on(context.costs) if verified else made


def _shared_out(plan: Plan, context: Context, *, verified: bool) -> Compiled:
    """The plan, with the shares of rollouts that two pools share out, and why each is so."""

    def period(placement: Placement) -> float | None:
        tried = replace(context, placement=placement, rough=True, optimize=0.0)
        try:
            timing = _cut(plan, tried, verified=False).plan.timing
        except PlanError:
            return None
        return None if timing is None else timing.seconds

    placement, texts = with_shares_found(plan.graph, context.placement, period)
    made = _keeping_whole(plan, replace(context, placement=placement), verified=verified)
    for text in texts:
        made = made.noting("portions", text)
    return made


def _keeping_whole(plan: Plan, context: Context, *, verified: bool) -> Compiled:
    """The plan, with layers, or gradients, that stay whole for longer where that is shorter.

    One trained instance after another is tried; a plan that does not fit, or is no shorter by
    shapes and tables, is not taken. Rough plans are as they are said.
    """
    made, texts = _cut(plan, context, verified=verified), []
    for way, name in () if context.rough else faster_whole(made.plan, context):
        kept = choosing(context, way, name)
        try:
            tried = _cut(plan, kept, verified=verified)
        except PlanError:
            continue
        before, after = made.plan, tried.plan
        if context.costs.cluster.measured.records:
            known = [by_tables(each) for each in (context, kept)]
            before, after = (_cut(plan, each, verified=False).plan for each in known)
        if estimated_period(after) < estimated_period(before):
            made, context = tried, kept
            texts += [whole_text(name, before, after)] if way == "kept_whole" else []
    for text in texts:
        made = made.noting("reshard", text)
    return made


def _cut(plan: Plan, context: Context, *, verified: bool) -> Compiled:
    """The plan in the chunks that its placement says, or as many as are shortest."""
    chunks, begun = context.placement.stream, Compiled(plan=plan, stages=())
    if chunks == "auto":
        return _streamed(begun, context, verified=verified)
    return _in_chunks(begun, replace(context, chunks=chunks), verified=verified)


def _in_chunks(begun: Compiled, context: Context, *, verified: bool) -> Compiled:
    """The plan in so many chunks: of complete groups where updates follow those, or of rows.

    Rows where groups do not fit, or where forwards that get rows sooner make it shorter.
    """
    by_groups, by_rows = replace(context, groups=True), replace(context, groups=False)
    if context.chunks == 1 or context.groups is not None:
        return _compiled(begun, context, verified=verified)
    try:
        made = _compiled(begun, by_groups, verified=verified)
    except PlanError as refused:
        try:
            made = _compiled(begun, by_rows, verified=verified)
        except PlanError:
            raise refused from None
        return made.noting("stream", groups_do_not_fit(refused.findings[0].what))
    followed = any(a.chunk is not None and a.chunk.by == "groups" for a in made.plan.actions)
    if not followed or context.rough:
        return made
    try:
        other = _compiled(begun, by_rows, verified=verified)
    except PlanError:
        return made
    rows, groups = estimated_period(other.plan), estimated_period(made.plan)
    return other.noting("stream", rows_are_shorter(rows, groups)) if rows < groups else made


def _noting_graph(plan: Plan, notes: Sequence[tuple[str, str]], near: Path | None) -> Plan:
    """The plan with what is said of its graph: `notes`, then heads and states."""
    heads = [("value head", text) for text in head_notes(plan.graph, near)]
    states = [("state", text) for text in memory_notes(plan.graph)]
    for rule, text in (*notes, *heads, *states):
        plan = plan.noting(rule, text)
    return plan


def _checked_shapes(graph: Graph, near: Path | None) -> dict[str, Shape | None]:
    """The shapes of all models, read from files that fit what the graph does with them."""
    shapes = {model.name: model_shape(model, near) for model in graph.models}
    findings = [*tokenizer_findings(graph, near), *model_findings(graph, shapes, near)]
    findings += [*vocabulary_findings(graph, shapes), *length_findings(graph, shapes)]
    if findings:
        raise PlanError(*findings)
    wrong = [*missing_tokenizers(graph, near), *head_findings(graph, near)]
    if wrong:
        raise UsageError(*wrong)
    return shapes


def _compiled(
    made: Compiled, context: Context, last: str = PASSES[-1][0], *, verified: bool
) -> Compiled:
    """Goes on with the passes to the `last`, with the verifier after each where it is wanted.

    Each pass finds the costs of the graph that the plan before it runs. Where runs do not fit
    beside what stays on their devices, which the transfers' plan is the first to know, those from
    `bind` are done again with less room for them.
    """
    titles = [title for title, _ in PASSES]
    plan, stages = made.plan, list(made.stages)
    tried: tuple[Instance, ...] = ()
    while not stages or stages[-1][0] != last:
        title, run = PASSES[len(stages)]
        context = replace(context, costs=replace(context.costs, graph=plan.graph))
        plan = run(plan, context)
        broken = verify(plan, stage=title) if verified else []
        if broken:
            raise InvariantError(
                *(Finding(code="E901", what=f"after pass {title!r}: {text}") for text in broken),
                summary="This is a bug in rlflow: it refuses to run a plan it cannot prove.",
            )
        stages.append((title, plan))
        if title == "transfer" and plan.instances != tried:
            rooms, tried = rooms_left(plan, context), plan.instances
            if rooms:
                context = replace(context, rooms=rooms)
                del stages[titles.index("bind") :]
                plan = stages[-1][1]
    return Compiled(plan=plan, stages=tuple(stages))


def _streamed(made: Compiled, context: Context, *, verified: bool) -> Compiled:
    """The plan with as many chunks as shorten the estimated iteration."""
    bound = _compiled(made, context, "bind", verified=verified)

    def made_in(chunks: int, optimize: float) -> Compiled:
        chunked = replace(context, chunks=chunks, optimize=optimize)
        return _in_chunks(bound, chunked, verified=verified)

    planned = functools.cache(lambda chunks: made_in(chunks, 0.0))
    chunks, why = choose_chunks(bound.plan, lambda count: planned(count).plan)
    made = made_in(chunks, context.optimize) if context.optimize else planned(chunks)
    return made.noting("stream", why)


def _require_room(
    graph: Graph, placement: Placement, cluster: Cluster, name: str, *, local: bool
) -> None:
    """Raise PlanError where a placement is not for this graph, these devices or one process."""
    if placement.num_devices() > cluster.count:
        raise PlanError(_too_few_devices(placement, cluster, name))
    findings = [*unknown_assignments(graph, placement), *_not_compiled(placement, name)]
    findings += mixed_pools(placement.devices(), cluster)
    if local:
        findings += not_local(placement, cluster)
    if findings:
        raise PlanError(*findings)


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
    for kind, _ in cluster.kinds:
        if kind.chip in TAKEN_FOR_GRANTED:
            plan = plan.noting("taken for granted", TAKEN_FOR_GRANTED[kind.chip])
    for text in stand_ins(plan.graph.models):
        plan = plan.noting("model shape", text)
    return plan


def not_local(placement: Placement, cluster: Cluster) -> list[Finding]:
    """Why one process cannot run it: a pool of several devices, or several accelerators."""
    pools = [
        f"pool {name!r} has {len(devices)} devices"
        for name, devices in placement.devices().items()
        if len(devices) > 1
    ]
    named = " and ".join(dict.fromkeys(kind.name for kind, _ in cluster.kinds))
    several = not cluster.is_cpu and placement.num_devices() > 1
    kinds = [f"the devices are {named}"] if several else []
    if not pools and not kinds:
        return []
    return [
        Finding(
            code="E403",
            what="the local backend runs one accelerator, or CPU pools of one device each",
            got=", ".join([*kinds, *pools]),
            expected="one accelerator, one CPU device a pool, or a process for every device",
            fix="--backend ray",
        )
    ]


def _too_few_devices(placement: Placement, cluster: Cluster, name: str) -> Finding:
    placed = placement.devices().items()
    pools = ", ".join(f"{pool} [{numbers(devices)}]" for pool, devices in placed)
    more = f"{cluster.kind.name}:{placement.num_devices()}"
    return Finding(
        code="E203",
        what=f"placement {name!r} needs {placement.num_devices()} devices, there are "
        f"{cluster.count}",
        got=f"pools: {pools}",
        expected=f"at most {cluster.count} of {cluster.describe()}",
        fix=f'devices = "{more}" in the file' if cluster.kind.family else f"--devices {more}",
    )


def dump_plan(plan: Plan) -> str:
    """The plan as JSON text, stable to the byte."""
    beside: dict[str, object] = {"declared": asdict_graph(plan), "inputs": list(plan.inputs)}
    if plan.range is not None:
        beside["range"] = plan.range.as_json()
        beside["worlds"] = asdict(plan.range)
    document = {"hash": plan.hash, **plan.to_json(), **beside}
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def asdict_graph(plan: Plan) -> dict[str, object]:
    """The graph the plan runs, as plain data."""
    return dict(plan.graph.to_json())
