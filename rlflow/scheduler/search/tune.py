"""`tune`: the placement with the shortest period that fits, found by a bounded search.

Ways to divide the devices are ranked by a lower bound that needs no plan, the promising
ones are compiled, and the best of those changed one choice at a time. What is shown has
been verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import On, Placement, on
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.origins import Prompts
from rlflow.scheduler.costs.rows.given import check_lengths
from rlflow.scheduler.devices.cluster import Cluster, amount
from rlflow.scheduler.models.shapes import Shape, model_shape
from rlflow.scheduler.passes.rewrite import rewrite
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.period_range import Contest, contest
from rlflow.scheduler.plan.plan import Backend, Plan
from rlflow.scheduler.plan.text import counted
from rlflow.scheduler.search.bounds import Figure, Figures, PeriodBounds
from rlflow.scheduler.search.candidates import WORTH, Moves
from rlflow.scheduler.search.engines import by_engine, with_engines
from rlflow.scheduler.search.families import placement_family
from rlflow.scheduler.search.known_costs import KnownCosts
from rlflow.scheduler.search.ranges import divisions, unions
from rlflow.scheduler.search.search import Search, Tried
from rlflow.scheduler.search.space import Choice, placed_uses
from rlflow.scheduler.simulate.ranges import period_range

STREAMS = (1, 2, 4, 8)
MOST_PLANS = 240
LEAST_PLANS = 40
NODES_TIMES_DEVICES = 160_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What placements may use: most staleness, counts of chunks; how many are shown.

    `plans` is how many are compiled, about; by the size of graph and cluster if None. `engine`
    makes all rollouts; left out, the embedded one or another that a placement names. With
    `families` the best of each family of placements is kept beside those that are shown.
    """

    staleness: int = 0
    streams: tuple[int, ...] = STREAMS
    top: int = 10
    plans: int | None = None
    engine: str | None = None
    families: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The placements found, best first: the best of every pattern of roles and staleness.

    `written` are those of the pipeline that fit, each with its rank; `misfits` the others, with
    the reason. `refused` counts placements that do not fit, by reason; `samples` are rows that
    an iteration trains on. Two placements are told apart where they differ by more than what is
    uncertain (`scheduler/simulate/ranges.py`).
    """

    rows: tuple[Tried, ...]
    written: tuple[tuple[int, Tried], ...]
    misfits: Mapping[str, str]
    refused: Mapping[str, int]
    looked_at: int
    compiled: int
    samples: int
    graph: Graph
    cluster: Cluster
    tokens: float = 0.0
    """Tokens of those samples' responses, in expectation."""
    rival: Tried | None = None
    """What the best is compared with: the best of the pipeline's own, else the second of kinds."""
    contest: Contest | None = None
    """The best beside its rival in many worlds; None on CPU devices, or where there is none."""
    costs: Costs | None = field(default=None, repr=False, compare=False)
    """The estimates that placements were compared by."""
    families: tuple[Tried, ...] = ()
    """The best of each family that no row is of, where they were asked for."""
    tf32: Tried | None = None
    """The best with products of float32 models by TF32, where that is shorter: numbers change."""

    @property
    def best(self) -> Tried:
        """The best placement."""
        return self.rows[0]


def search_placements(
    graph: Graph,
    placements: Mapping[str, Placement],
    cluster: Cluster,
    *,
    limits: SearchLimits | None = None,
    near: Path | None = None,
    backend: Backend | None = None,
) -> Tuned:
    """Search placements of a graph on a cluster; `placements` are the pipeline's own.

    Raises PlanError E240 where nothing fits, or what all plans are refused for where that is one
    thing, E241 where a model's size is not known, E242 where there is no model to place, E249 and
    others where the engine asked for cannot run a model, or what drafts for it; InvariantError
    where a plan that is shown breaks an invariant.
    """
    limits = limits or SearchLimits()
    shapes = {model.name: model_shape(model, near) for model in graph.models}
    check_lengths(graph)
    costs = KnownCosts(graph=graph, cluster=cluster, shapes=shapes, prompts=Prompts(near))
    plan = _rewritten(graph, cluster, costs)
    _check_known(plan.graph, shapes)
    roles = with_engines(placed_uses(plan.graph), placements, limits.engine, costs)
    figures = Figures(plan, costs, roles)

    def compiler(placement: Placement, name: str, verified: bool) -> Plan:
        return compile_plan(
            graph,
            placement,
            cluster,
            name=name,
            backend=backend,
            costs=costs,
            verified=verified,
        ).plan

    search = Search(
        graph=graph,
        moves=Moves(
            figures=figures,
            bounds=PeriodBounds(plan.graph, figures),
            cluster=cluster,
            staleness=limits.staleness,
            streams=limits.streams,
        ),
        compiler=compiler,
        budget=limits.plans or _plans(plan.graph, cluster),
        top=limits.top,
    )
    search.compile_written(by_engine(placements, roles, limits.engine), cluster.count)
    search.compile_usual()
    search.compile_promising()
    search.climb()
    search.compile_staged()
    search.compile_helped()
    search.compile_continuous()
    search.compile_drafting()
    if not search.ranks:
        raise search.one_reason() or PlanError(_nothing_fits(plan.graph, search, cluster))
    return _result(plan.graph, search, limits, cluster)


def _plans(graph: Graph, cluster: Cluster) -> int:
    """How many plans to compile: fewer of large ones."""
    size = max(1, len(graph.nodes) * cluster.count)
    return min(MOST_PLANS, max(LEAST_PLANS, NODES_TIMES_DEVICES // size))


def _result(graph: Graph, search: Search, limits: SearchLimits, cluster: Cluster) -> Tuned:
    """What the search found; plans that are shown are compiled whole, as `plan` does it."""
    top = limits.top

    def whole(tried: Tried) -> Tried:
        plan = search.compiler(tried.placement, tried.name or "tuned", True)
        return replace(tried, plan=plan)

    rows = sorted(map(whole, search.ranked()[:top]), key=Tried.rank)
    ranks = [row.rank() for row in rows] + [rank for rank, _ in search.ranks[top:]]
    written = [
        (sum(rank < tried.rank() for rank in ranks) + 1, tried)
        for tried in map(whole, search.written.values())
    ]
    costs = search.moves.figures.costs
    updates = [node for model in graph.models for node in graph.updates(model.name)]
    taken = max(updates or graph.nodes, key=costs.rows, default=None)
    samples = 0 if taken is None else costs.rows(taken)
    shown = {placement_family(row) for row in rows}
    others = {placement_family(t): t for t in search.ranked()[::-1]} if limits.families else {}
    rival = _rival(rows, [tried for _, tried in written])
    return Tuned(
        rows=tuple(rows),
        written=tuple(sorted(written, key=lambda pair: (pair[0], pair[1].rank()))),
        misfits=search.misfits,
        refused=dict(sorted(search.moves.refused.items())),
        looked_at=search.moves.looked_at,
        compiled=search.compiled,
        samples=samples,
        graph=graph,
        cluster=cluster,
        tokens=0.0 if taken is None else samples * costs.lengths(taken).mean,
        rival=rival,
        contest=None if rival is None else contest_of(rows[0], rival, costs),
        costs=costs,
        families=tuple(whole(tried) for name, tried in others.items() if name not in shown),
        tf32=_by_tf32(rows[0], search, cluster),
    )


def _by_tf32(best: Tried, search: Search, cluster: Cluster) -> Tried | None:
    """The best placement with TF32; None where it has nothing to gain, or is refused."""
    placement = by_tf32(search.graph, best.placement, cluster)
    if placement is None:
        return None
    try:
        plan = search.compiler(placement, "tuned", True)
    except PlanError:
        return None
    found = replace(best, name="", placement=placement, plan=plan)
    return found if found.period < best.period * WORTH else None


def by_tf32(graph: Graph, placement: Placement, cluster: Cluster) -> Placement | None:
    """The placement with products of float32 models by TF32; None where that changes nothing.

    Of what this process computes: engines in processes of their own have dtypes of their own.
    """
    able = any(kind.has_tf32 for kind, _ in cluster.kinds)
    wide = any(model.dtype == "float32" for model in graph.models)
    if not (able and wide):
        return None
    assign = {
        key: where if _outside(where) or where.tf32 is not None else _with_tf32(where)
        for key, where in placement.assign.items()
    }
    return None if assign == placement.assign else placement.model_copy(update={"assign": assign})


def _outside(where: On) -> bool:
    return EnginePlan.chosen(where).own_process


def _with_tf32(where: On) -> On:
    helps = where.also is not None and not _outside(where.also)
    also = where.also.model_copy(update={"tf32": True}) if where.also and helps else where.also
    return where.model_copy(update={"tf32": True, "also": also})


def _rival(rows: Sequence[Tried], written: Sequence[Tried]) -> Tried | None:
    """What the best is compared with, where it is not of the pipeline itself."""
    if not rows[0].name and written:
        return min(written, key=Tried.rank)
    return rows[1] if len(rows) > 1 else None


def contest_of(first: Tried, second: Tried, costs: Costs) -> Contest | None:
    """Two placements world by world; None on CPU devices, which a run makes exact."""
    if costs.cluster.is_cpu:
        return None
    found = []
    for plan in (first.plan, second.plan):
        known = replace(costs, graph=plan.graph, backend=plan.backend, staleness=plan.staleness)
        found.append(period_range(plan, known))
    return None if found[0] is None or found[1] is None else contest(found[0], found[1])


def _rewritten(graph: Graph, cluster: Cluster, costs: KnownCosts) -> Plan:
    """The graph as it is left with everything on the same devices, in a plan of nothing else."""
    together = Placement(pools={"all": cluster.count}, assign={"*": on("all")})
    plan = Plan(
        graph=graph,
        placement="tuned",
        cluster=cluster.describe(),
        budgets=cluster.budgets(),
        backend="local",
        staleness=0,
        pools=together.devices(),
        hosts=cluster.hosts,
    )
    return rewrite(plan, Context(placement=together, cluster=cluster, costs=costs))


def _check_known(graph: Graph, shapes: Mapping[str, Shape | None]) -> None:
    """Raise PlanError where there is nothing to place, or sizes that nobody knows."""
    if not graph.models:
        what = f"{graph.name!r} has no model: there is nothing to place"
        raise PlanError(Finding(code="E242", what=what, where=graph.source))
    unknown = [
        Finding(
            code="E241",
            what=f"the size of model {model.name!r} is not known",
            where=model.where,
            got=f"{model.path} is not on this machine",
            expected="its config.json, or a public model of the same shape",
            fix="--model-shape qwen2.5-7b",
        )
        for model in graph.models
        if shapes[model.name] is None
    ]
    if unknown:
        raise PlanError(*unknown)


def _nothing_fits(graph: Graph, search: Search, cluster: Cluster) -> Finding:
    """E240, with the largest role in the layout that comes nearest, and what it lacks."""
    figures, got = search.moves.figures, []
    ranges = sorted({r for division in divisions(cluster) for r in unions(division, cluster)})
    nearest: list[tuple[int, int, Choice, Figure]] = []
    for role in range(len(figures.roles)):
        for where in ranges:
            for choice in figures.with_ways(role, figures.options(role, where)):
                figure = figures.of(role, choice)
                if figure.why in (None, "memory"):
                    nearest.append((figure.need - figure.room, role, choice, figure))
    by_role = [
        min((found for found in nearest if found[1] == role), key=lambda f: (f[0], f[2]))
        for role in sorted({role for _, role, _, _ in nearest})
    ]
    lacking, role, choice, figure = max(by_role, key=lambda found: found[:2])
    if lacking > 0:
        devices = counted(choice.stop - choice.start, "device")
        got.append(
            f"the nearest is {figure.at} on {devices}, {choice.layout.describe()}: "
            f"{amount(figure.need)} at once, {amount(lacking)} more than there is"
        )
    elif search.last_error is not None:
        got.append(search.last_error.findings[0].what)
    refused = search.moves.refused
    got.append(f"refused: {', '.join(f'{count} {why}' for why, count in sorted(refused.items()))}")
    return Finding(
        code="E240",
        what=f"no placement of {graph.name!r} fits {cluster.describe()}",
        where=graph.source,
        got="\n".join(got),
        expected="room on every device for what its largest action needs",
        fix="more devices or memory, a smaller batch, or more mini_batches in the update",
    )
