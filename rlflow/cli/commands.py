"""What the commands do before anything runs: declare, compile, check, compare, explain.

Imports neither torch nor ray. Every function raises the errors of `rlflow.errors`.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from rlflow.cli.config import load_pipeline, named_placement, trace_error
from rlflow.cli.options import chunks_said
from rlflow.cli.planning.lengths import asked_acceptance, asked_lengths
from rlflow.cli.planning.missing_models import hub_findings, missing_model_findings
from rlflow.cli.stages.parts import part_placement, taken_part
from rlflow.data import DataSource
from rlflow.errors import DataError, Finding, PlanError, RlflowError, UsageError, near_names
from rlflow.graph.cut.part import GraphPart
from rlflow.graph.graph import Graph
from rlflow.graph.pipeline import Config, Pipeline, make_config
from rlflow.graph.placement import Placement
from rlflow.graph.roles import Drawn
from rlflow.graph.user.lengths import Lengths
from rlflow.scheduler.compile import Compiled, compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.origins import Prompts
from rlflow.scheduler.devices.cluster import Cluster, parse_cluster
from rlflow.scheduler.devices.machine import machine_gpus, usable
from rlflow.scheduler.models.flops import product_sizes
from rlflow.scheduler.models.known_shapes import PREFIX, parse_model_shape
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.passes.portions import with_shares
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Backend, Plan
from rlflow.scheduler.plan.text import table
from rlflow.scheduler.search.engines import made_by
from rlflow.scheduler.search.remedies import with_remedies
from rlflow.scheduler.simulate.overlap import overlapping
from rlflow.userfiles import kept_alive

NOTHING = "Nothing was started."


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a command looks at, as typed; a program may give values instead of their names."""

    pipeline: str | Pipeline
    placement: str | Placement | None = None
    settings: tuple[str, ...] = ()
    config: Config | None = None
    devices: str | None = None
    threads: int | None = None
    host_memory: str | None = None
    reserve: str | None = None
    backend: Backend | None = None
    model_shape: str | None = None
    lengths: str | Lengths | None = None
    acceptance: float | None = None
    staleness: int | None = None
    stream: str | None = None
    pause_at: int | None = None
    optimize: float | None = None
    engine: str | None = None
    only: tuple[str, ...] = ()
    from_: tuple[str, ...] = ()
    rooms: tuple[int, ...] = ()
    """Devices that each node of a running cluster has room for, in the order they are taken."""
    left: int | None = None
    """Devices that are left of those asked for, None for all."""
    shares: tuple[tuple[str, int], ...] = ()
    """Prompts of rollouts that pools which help draw, where a placement leaves their number out."""
    groups: bool | None = None
    """Whether chunks are of complete groups or of rows, None for what is shorter by estimates."""

    @property
    def named(self) -> str:
        """The pipeline as one types it after a command."""
        if isinstance(self.pipeline, str):
            return self.pipeline
        path, name = self.pipeline.path, self.pipeline.function.__name__
        return f"{path}:{name}" if path is not None and path.is_file() else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A pipeline that was traced: its `whole` graph, and the part of it that a command takes."""

    pipeline: Pipeline
    config: Config
    whole: Graph
    part: GraphPart

    @property
    def graph(self) -> Graph:
        """The graph that is compiled."""
        return self.part.graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A pipeline that was compiled for a cluster."""

    declared: Declared
    target: Target
    cluster: Cluster
    compiled: Compiled


def declare(target: Target, staleness: int = 0) -> Declared:
    """Load and trace the pipeline; what that prints is no result, and goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        return _declared(target)


def _declared(target: Target) -> Declared:
    pipeline = load_pipeline(target.pipeline)
    config = target.config or make_config(pipeline.config, target.settings)
    try:
        with kept_alive():
            graph = pipeline.trace(config)
    except (RlflowError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit and classes of one's own beside Exception too
        raise trace_error(pipeline, error) from None
    if target.model_shape:
        graph = with_shapes(graph, target.model_shape)
    if target.lengths is not None:
        graph = replace(graph, lengths=asked_lengths(target.lengths))
    if target.acceptance is not None:
        graph = replace(graph, acceptance=asked_acceptance(target.acceptance))
    part = taken_part(graph, target.only, target.from_)
    return Declared(pipeline=pipeline, config=config, whole=graph, part=part)


def with_shapes(graph: Graph, text: str) -> Graph:
    """The graph with public models, known by shape alone, in the place of those named."""
    taken = parse_model_shape(text, tuple(model.name for model in graph.models))
    models = (
        model.model_copy(update={"path": f"{PREFIX}{taken[model.name]}"})
        if model.name in taken
        else model
        for model in graph.models
    )
    return replace(graph, models=tuple(models))


def compile_target(target: Target) -> Planned:
    """Load, trace and compile the pipeline under the placement asked for."""
    declared = declare(target)
    findings = hub_findings(declared.graph, declared.pipeline.path, needed=False)
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    return plan_declared(declared, target)


def plan_declared(declared: Declared, target: Target, cluster: Cluster | None = None) -> Planned:
    """Compile a declared pipeline under the placement asked for, on its cluster or another."""
    name, placement = named_placement(declared.pipeline, target.placement)
    placement = changed(declared, placement, target)
    if cluster is None:
        cluster = _cluster(target, placement)
    compiled = _compiled(declared, name, placement, cluster, target)
    return Planned(declared=declared, target=target, cluster=cluster, compiled=compiled)


def changed(declared: Declared, placement: Placement, target: Target) -> Placement:
    """The placement as the command line changes it: part, staleness, pause, chunks, and engine."""
    placement = part_placement(declared.whole, declared.graph, placement)
    placement = with_shares(declared.graph, placement, dict(target.shares))
    if target.engine is not None:
        placement = made_by(declared.graph, placement, target.engine)
    asked = {"staleness": target.staleness, "pause_at": target.pause_at}
    said: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if target.stream is not None:
        said["stream"] = chunks_said(target.stream)
    return placement.model_copy(update=said) if said else placement


def _cluster(target: Target, placement: Placement) -> Cluster:
    """The devices asked for, with what is measured of them."""
    cluster = cluster_of(target, devices_for(placement, target))
    if cluster.measured.problem:
        sys.stderr.write(f"warning: {cluster.measured.problem}; measured costs are ignored\n")
    if target.left is not None:
        cluster = replace(cluster, count=min(cluster.count, target.left))
    if target.rooms:
        needed = placement.at(cluster.count).num_devices()
        cluster = replace(cluster, hosts=_hosts(target.rooms, needed))
    return cluster


def devices_for(placement: Placement, target: Target) -> int:
    """How many devices a placement takes where none are named: of shares, all GPUs that it can."""
    own = usable(machine_gpus()) if placement.shares and target.devices is None else None
    return placement.num_devices() if own is None else placement.most_of(own[1])


def cluster_of(target: Target, needed: int) -> Cluster:
    """The devices that a command is told, or as many of this machine's as are needed."""
    memory = target.host_memory, target.reserve
    return parse_cluster(target.devices, needed, target.threads, *memory)


def costs_of(planned: Planned) -> Costs:
    """The estimates that a plan was compiled with."""
    declared, plan = planned.declared, planned.compiled.plan
    near = declared.pipeline.path
    return Costs(
        graph=plan.graph,
        cluster=planned.cluster,
        shapes={model.name: model_shape(model, near) for model in declared.graph.models},
        backend=plan.backend,
        staleness=plan.staleness,
        prompts=Prompts(near),
    )


def peaks_of(planned: Planned) -> dict[str, Any]:
    """What a report compares a run with: peak flop/s of an accelerator, the products of models.

    A CPU's rates are measured, and no peaks.
    """
    kind, shapes = planned.cluster.kind, costs_of(planned).shapes
    heads = {model.name: model.head for model in planned.declared.graph.models}
    products = {
        name: asdict(product_sizes(shape, predicts=heads[name] != "value"))
        for name, shape in shapes.items()
        if shape is not None
    }
    dtypes = {model.name: model.dtype for model in planned.declared.graph.models}
    found: dict[str, Any] = {"kind": kind.name, "products": products, "dtypes": dtypes}
    rates = {} if planned.cluster.is_cpu else {"flops": kind.flops, "flops32": kind.flops32}
    return found | rates


def _hosts(rooms: tuple[int, ...], count: int) -> int:
    """Nodes that so many devices take: one where one has room, else node by node."""
    if max(rooms) >= count:
        return 1
    reached = (nodes for nodes, room in enumerate(accumulate(rooms), 1) if room >= count)
    return next(reached, len(rooms))


def _compiled(
    declared: Declared,
    name: str,
    placement: Placement,
    cluster: Cluster,
    target: Target,
) -> Compiled:
    """The plan; a missing model or a broken row, met on the way, is the user's to mend."""
    near, graph = declared.pipeline.path, declared.graph
    try:
        return compile_plan(
            graph,
            placement,
            cluster,
            name=name,
            near=near,
            backend=target.backend,
            optimize=target.optimize or 0.0,
            notes=declared.part.notes,
            groups=target.groups,
        )
    except PlanError as error:
        ways: Any = {"near": near, "backend": target.backend}
        raise with_remedies(error, graph, placement, cluster, **ways) from None
    except DataError as error:
        raise UsageError(*error.findings, summary=NOTHING) from None
    except UsageError as error:
        findings = missing_model_findings(declared.graph, near) or list(error.findings)
        raise UsageError(*findings, summary=NOTHING) from None


def data_findings(graph: Graph, *, remote: bool = False) -> list[Finding]:
    """Everything that is wrong with the data sources of a graph; each source is checked once.

    Sources that may need the network are left to `rlflow run` (`remote=True`).
    """
    seen: list[DataSource] = []
    findings: list[Finding] = []
    for _, drawn in graph.having(Drawn):
        source = drawn.data
        if isinstance(source, DataSource) and source not in seen and (remote or not source.remote):
            seen.append(source)
            findings += source.check()
    return findings


def check_all(target: Target) -> dict[str, Any]:
    """Check the graph, its data, and one placement or all; raises with every finding."""
    declared = declare(target)
    findings = data_findings(declared.graph)
    findings += hub_findings(declared.graph, declared.pipeline.path, needed=False)
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    placements = declared.pipeline.placements
    wanted = [str(target.placement)] if target.placement else list(placements)
    graph = declared.graph
    models = f"{len(graph.models)} model{'s' * (len(graph.models) != 1)}"
    lines = [f"{graph.name}: {len(graph.nodes)} nodes, {models}   ok"]
    plans = {}
    for name in wanted:
        _, placement = named_placement(declared.pipeline, name)
        plan = _check_placement(declared, name, placement, target)
        plans[name] = plan.hash
        lines.append(f"placement {name}: {len(plan.actions)} actions on {plan.cluster}   ok")
    return {"pipeline": graph.name, "graph": graph.hash, "placements": plans, "lines": lines}


def _check_placement(declared: Declared, name: str, placement: Placement, target: Target) -> Plan:
    """Compile a placement, on enough CPU devices of any size where none are named."""
    from rlflow.scheduler.devices.cluster import cpu_cluster

    placement = changed(declared, placement, target)
    needed = placement.num_devices()
    devices = cluster_of(target, needed) if target.devices else cpu_cluster(needed, target.threads)
    return _compiled(declared, name, placement, devices, target).plan


def config_lines(planned: Planned) -> list[str]:
    """The resolved config, one field a line, with where each value comes from."""
    given = {setting.partition("=")[0].partition(".")[0] for setting in planned.target.settings}
    values = planned.declared.config.model_dump()
    rows = [
        (key, "=", str(value), "--set" if key in given else "default")
        for key, value in values.items()
    ]
    return table(rows, "")


def explain_action(plan: Plan, name: str) -> str:
    """Everything about one action, by its id or the node it runs; of chunks, about the first."""
    names = [action.id for action in plan.actions]
    runs = [a.id for a in plan.actions if a.kind == "run" and a.node == name]
    name = runs[0] if runs and name not in names else name
    if name not in names:
        raise UsageError(
            Finding(
                code="E206",
                what=f"the plan has no action {name!r}",
                expected=", ".join(names),
                near=near_names(name, names),
            )
        )
    action = plan.action(name)
    return explain(plan, action, overlapping(plan, action))
