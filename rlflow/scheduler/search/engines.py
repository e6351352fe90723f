"""Which engines `tune` may generate with: the embedded one, and those that somebody names.

Knows assignments and roles; neither devices nor seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import On, Placement
from rlflow.graph.roles import Drafted
from rlflow.graph.user.engine_options import EngineOptions, engine_named, options_of
from rlflow.graph.user.speculative import Speculative
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.engines.drafters import drafts_findings
from rlflow.scheduler.engines.engines import option_findings
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.search.layouts import Layout
from rlflow.scheduler.search.space import Choice, PlacedUse, as_named, role_instance

DRAFTS = (3, 7)
"""How many tokens n-grams propose a turn."""


def with_engines(
    roles: tuple[PlacedUse, ...],
    placements: Mapping[str, Placement],
    name: str | None,
    costs: Costs,
) -> tuple[PlacedUse, ...]:
    """The roles with what their rollouts may be made by.

    The embedded engine and those that a placement names for one of their nodes; with a `name`
    that one alone, with the options that a placement gives it. Raises PlanError E245 for an unknown
    name, E249 for a model that the engine asked for cannot run, and what else it refuses wherever
    it lies: E264, E630, E638, E639 and E678 of drafters.
    """
    engine_named(name)
    made, findings = [], list[Finding]()
    for role in roles if name is None else ():
        able = [o for o in _named(role, placements) if not _refused(role, o, costs)]
        made.append(replace(role, engines=(None, *able)) if role.rollout else role)
    for role in roles if name is not None else ():
        options = _asked(role, placements, str(name)) if role.rollout else None
        findings += [] if options is None else _refused(role, options, costs)
        made.append(replace(role, engines=(options,)) if role.rollout else role)
    if findings:
        raise PlanError(*findings)
    return tuple(made)


def by_engine(
    placements: Mapping[str, Placement], roles: tuple[PlacedUse, ...], name: str | None
) -> dict[str, Placement]:
    """The placements of a pipeline with all rollouts made by the engine of that name.

    One that changes by that is known as `split with sglang`; without a name none changes.
    """
    found: dict[str, Placement] = {}
    for title, placement in placements.items():
        assign = dict(placement.assign)
        for role in roles if name is not None else ():
            for node in role.nodes if role.rollout else ():
                where = assignment(node, placement)
                if where is not None and _engine(where) != name:
                    key = node.name if node.name in placement.assign else role.key
                    assign[key] = _moved(where, role.engines[0])
        same = assign == placement.assign
        changed = placement if same else placement.model_copy(update={"assign": assign})
        found[title if same else f"{title} with {name}"] = changed
    return found


def made_by(graph: Graph, placement: Placement, name: str) -> Placement:
    """The placement with all rollouts made by the engine of that name, where they are.

    Options that it has already for that engine stay. Raises PlanError E245 for an unknown name.
    """
    engine_named(name)
    assign = dict(placement.assign)
    for node in graph.nodes:
        where = assignment(node, placement) if node.op.use == "rollout" else None
        if where is not None and _engine(where) != name:
            key = node.name if node.name in placement.assign else f"{node.model}.rollout"
            assign[key] = _moved(where, options_of(name))
    return placement.model_copy(update={"assign": assign})


def _engine(where: On) -> str:
    return EnginePlan.chosen(where).name


def _moved(where: On, options: EngineOptions | None) -> On:
    """An assignment of a rollout to the same devices, made by another engine."""
    if options is None:
        return where.model_copy(update={"engine": None})
    return On(pool=where.pool, tp=where.tp, engine=as_named(options))


def _asked(role: PlacedUse, placements: Mapping[str, Placement], name: str) -> EngineOptions | None:
    """The engine of that name, with the options that a placement gives it for a role."""
    wanted = (options for options in _named(role, placements) if options.engine == name)
    return next(wanted, None) or options_of(name)


def _named(role: PlacedUse, placements: Mapping[str, Placement]) -> list[EngineOptions]:
    """The engines that placements name for a role's nodes, in the order written, each once."""
    chosen = (
        assignment(node, placement) for placement in placements.values() for node in role.nodes
    )
    options = (where.options for where in chosen if where is not None)
    return list({found.describe(): found for found in options if found is not None}.values())


def _refused(role: PlacedUse, options: EngineOptions, costs: Costs) -> list[Finding]:
    """What keeps an engine from a role's models, each once, whatever devices it has."""
    where = On(pool="all", engine=options)
    found: dict[str, Finding] = {}
    for node in role.nodes:
        for finding in option_findings(node, where, costs):
            found.setdefault(finding.what.partition(": ")[2], finding)
    return list(found.values()) or _not_drafting(role, options, costs)


def _not_drafting(role: PlacedUse, options: EngineOptions, costs: Costs) -> list[Finding]:
    """What keeps a role's engine from drafting on any kind of device; empty if one does."""
    role = replace(role, engines=(options,))
    layout, cluster = Layout(engine=options.describe()), costs.cluster
    firsts = {cluster.kind_of(n).name: n for n in reversed(range(cluster.count))}
    every = []
    for first in sorted(firsts.values()):
        made = role_instance(role, Choice(first, first + 1, layout))
        made = replace(made, name=f"{role.model}@all/{options.engine}", pool="all")
        every.append(
            list(drafts_findings(made, role.nodes, costs)) if made.engine_plan.drafts else []
        )
    return every[0] if all(every) else []


def with_ngrams(graph: Graph, placement: Placement) -> Iterator[Placement]:
    """The placement with engines that draft by n-grams; none where they do already, or cannot.

    Only where it is said how often drafts are accepted: an assumption decides for no engine.
    """
    if graph.acceptance is None or any(graph.having(Drafted)):
        return
    for tokens in DRAFTS:
        by = Speculative(algorithm="NGRAM", draft_tokens=tokens)
        assign = {key: _drafting(where, by) for key, where in placement.assign.items()}
        if assign != placement.assign:
            yield placement.model_copy(update={"assign": assign})


def _drafting(where: On, by: Speculative) -> On:
    engine = EnginePlan.chosen(where)
    if engine.sglang is None or engine.drafts_by_options:
        return where
    options = engine.sglang.model_copy(update={"speculative": by})
    also = None if where.also is None else _drafting(where.also, by)
    return where.model_copy(update={"engine": options, "also": also})
