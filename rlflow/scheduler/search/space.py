"""The space that `tune` searches: who is placed, on which devices, in which layouts.

A role is the uses of a model that are placed together: what trains it and reads it, or its
rollouts. A candidate gives each role a range of devices and a layout, and is a placement in
other words. Knows counts and divisors; neither seconds nor bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.graph.graph import Graph, Node
from rlflow.graph.placement import On, Placement
from rlflow.graph.roles import Drafted
from rlflow.graph.user.engine_options import EngineOptions
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.models.mixtures import apart_on
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.plan import MICRO_TOKENS, Instance
from rlflow.scheduler.search.layouts import (
    ENGINE_PARALLEL,
    TENSOR_PARALLEL,
    Layout,
    contexts_on,
    stages_on,
)
from rlflow.scheduler.search.ranges import Range

MOST_COMBINATIONS = 40_000
# What a placement of other uses says of an option that is of training alone.
OF_TRAINING = dict.fromkeys(("recompute", "reshard_after_forward", "gradient_sync", "schedule"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedUse:
    """Uses of `model` placed together under `key`; `source` is the role that trains its weights.

    One that is `averaged` changes where another model is trained; `averages` are the nodes that
    take what this one trains into such a model, on its devices. Rollouts are made by one of its
    `engines`, None for the embedded one.
    """

    key: str
    model: str
    nodes: tuple[Node, ...]
    trained: bool
    rollout: bool
    source: int | None = None
    averaged: bool = False
    averages: tuple[Node, ...] = ()
    engines: tuple[EngineOptions | None, ...] = (None,)

    @property
    def runs(self) -> tuple[Node, ...]:
        """All that runs where it is placed."""
        return (*self.nodes, *self.averages)

    def options(self, layout: Layout) -> EngineOptions | None:
        """The options of the engine that a layout names; None for the embedded one."""
        found = (o for o in self.engines if o is not None and o.describe() == layout.engine)
        return next(found, None)


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """The devices [start, stop) of a role, and its layout there."""

    start: int
    stop: int
    layout: Layout

    @property
    def range(self) -> Range:
        """First device, and the one after the last."""
        return self.start, self.stop

    def moved(self, by: int) -> Choice:
        """The same so many devices further."""
        return Choice(self.start + by, self.stop + by, self.layout)


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A choice for every role, in the order of the roles."""

    choices: tuple[Choice, ...]
    staleness: int = 0
    stream: int = 1


def placed_uses(graph: Graph) -> tuple[PlacedUse, ...]:
    """The roles of a graph, models in the order declared, each before its rollouts."""
    roles: list[PlacedUse] = []
    for model in graph.models:
        nodes = tuple(n for n in graph.nodes if n.model == model.name and n.averages is None)
        rollouts = tuple(node for node in nodes if node.op.use == "rollout")
        others = tuple(node for node in nodes if node.op.use != "rollout")
        trained = any(node.op.use == "train" for node in others)
        role = PlacedUse(
            key=model.name, model=model.name, nodes=nodes, trained=trained, rollout=False
        )
        role = replace(role, averaged=model.averaged)
        if others:
            averages = graph.averaging(model.name) if trained else ()
            roles.append(replace(role, nodes=others, averages=averages))
        if rollouts:
            key = f"{model.name}.rollout" if others else model.name
            source = len(roles) - 1 if trained else None
            roles.append(
                replace(role, key=key, nodes=rollouts, trained=False, rollout=True, source=source)
            )
    return tuple(roles)


def role_instance(role: PlacedUse, choice: Choice) -> Instance:
    """The instance that a role has alone on its devices; its engine with what drafts in it."""
    layout, options = choice.layout, role.options(choice.layout)
    pool = f"{choice.start}:{choice.stop}"
    roles = (node.role(Drafted) for node in role.nodes if options is not None)
    drafting = next((drafted for drafted in roles if drafted is not None), None)
    return Instance(
        name=f"{role.model}@{pool}",
        model=role.model,
        pool=pool,
        devices=tuple(range(choice.start, choice.stop)),
        uses=tuple(dict.fromkeys(node.op.use or "forward" for node in role.nodes)),
        trained=role.trained,
        fsdp=layout.fsdp,
        tp=layout.tp,
        ep=layout.ep,
        cp=layout.cp,
        pp=layout.pp,
        recompute="selective" if layout.selective else layout.recompute,
        kept_whole=layout.kept_whole,
        offload="layers" if layout.offload else "optimizer" if layout.hosted else None,
        options=options,
        drafter=None if drafting is None else drafting.by,
        draft_tokens=0 if drafting is None else drafting.tokens,
    )


def average_instance(node: Node, source: Instance) -> Instance:
    """The instance of the average that a node takes of another one, beside that."""
    return replace(
        source,
        name=f"{node.model}@{source.pool}",
        model=str(node.model),
        uses=("train",),
        recompute=False,
        recompute_first=None,
        kept_whole=False,
        offload=None,
        micro_tokens=MICRO_TOKENS,
    )


def classes_of(roles: tuple[PlacedUse, ...], ways: int) -> tuple[tuple[int, ...], ...]:
    """Roles that go to the same devices, as few as keep the combinations in bounds.

    First each by itself; then the frozen models together, the rollouts, the trained models.
    """
    groups: list[tuple[int, ...]] = [(index,) for index in range(len(roles))]
    kinds = (
        [i for i, role in enumerate(roles) if not role.trained and not role.rollout],
        [i for i, role in enumerate(roles) if role.rollout],
        [i for i, role in enumerate(roles) if role.trained],
    )
    for kind in kinds:
        if ways ** max(len(groups) - 1, 0) * ways * ways <= MOST_COMBINATIONS or len(kind) < 2:
            continue
        groups = [group for group in groups if group[0] not in kind]
        groups.append(tuple(kind))
    return tuple(sorted(groups))


def layouts_of(
    role: PlacedUse,
    where: Range,
    shape: Shape | None,
    cluster: Cluster,
    *,
    longest: int = 0,
    staged: bool = False,
) -> Iterator[Layout]:
    """The layouts of a role on a range: tensor parallelism within a host, then how to shard.

    Training shards over all, over a host (hybrid sharding) or not at all, and experts of a mixture
    may lie apart, and tokens of rows where the `longest` has more than a micro-batch. What is
    `staged` may be cut into stages of layers as well. A frozen model may stay on the host.
    """
    if role.rollout:
        yield from _engine_layouts(role, where, shape, cluster)
        return
    start, stop = where
    count, per_host = stop - start, -(-cluster.count // cluster.hosts)
    able = [tp for tp in TENSOR_PARALLEL if tp <= per_host and _divides(tp, shape)]
    able = [tp for tp in able if not count % tp and not start % tp]
    for tp in able:
        ranks = count // tp
        host = max(1, per_host // tp)
        sizes = [ranks, *([host] if host < ranks and ranks % host == 0 else []), 1]
        for fsdp in dict.fromkeys(sizes):
            yield Layout(fsdp=fsdp, tp=tp)
            yield from (Layout(fsdp, tp, ep=ep) for ep in apart_on(shape, fsdp, tp, host))
        if longest > MICRO_TOKENS:
            cuts = contexts_on(shape, ranks, tp, host)
            yield from (Layout(ranks // cp, tp, cp=cp) for cp in cuts)
        if staged and start % per_host == 0 and tp in (able[0], able[-1]):
            yield from stages_on(shape, count, tp, per_host)
    if not (role.trained or role.averaged) and role.source is None and None in role.engines:
        yield Layout(offload=True)


def _engine_layouts(
    role: PlacedUse, where: Range, shape: Shape | None, cluster: Cluster
) -> Iterator[Layout]:
    """The layouts of rollouts: replicas within a host, or of an engine over several whole ones."""
    start, stop = where
    per_host = -(-cluster.count // cluster.hosts)
    for tp in ENGINE_PARALLEL:
        whole = tp <= per_host or (tp % per_host == 0 and start % per_host == 0)
        if (stop - start) % tp or start % min(tp, per_host) or not whole:
            continue
        for options in role.engines:
            reach = min(per_host, TENSOR_PARALLEL[-1]) if options is None else tp
            hosts = -(-tp // per_host)
            if tp > reach or (options is not None and options.host_findings("", hosts)):
                continue
            if _divides(tp, shape, repeats=options is not None):
                yield Layout(tp=tp, engine="" if options is None else options.describe())
    if role.source is None and not role.averaged and None in role.engines:
        yield Layout(offload=True)


def _divides(tp: int, shape: Shape | None, *, repeats: bool = False) -> bool:
    return tp == 1 if shape is None else not shape.uncut(tp, repeats=repeats)


def on_of(role: PlacedUse, choice: Choice, pool: str) -> On:
    """A choice as an assignment; what the compiler derives by itself is left out."""
    layout, count = choice.layout, choice.stop - choice.start
    ranks = layout.tp * layout.cp * layout.pp
    derived = 1 if role.rollout or layout.offload else max(1, count // ranks)
    return On(
        pool=pool,
        fsdp=layout.fsdp if layout.fsdp != derived else None,
        tp=layout.tp if layout.tp > 1 else None,
        ep=layout.ep if layout.ep > 1 else None,
        cp=layout.cp if layout.cp > 1 else None,
        pp=layout.pp if layout.pp > 1 else None,
        recompute=layout.recomputes or None,
        reshard_after_forward=False if layout.kept_whole else None,
        offload="layers" if layout.offload else "optimizer" if layout.hosted else None,
        weights="own" if layout.own else None,
        engine=as_named(role.options(layout)),
    )


def as_named(options: EngineOptions | None) -> str | EngineOptions | None:
    """An engine as a user would write it: by its name where nothing else is said."""
    return options if options is None or options.said() else options.engine


def placement_of(
    candidate: Candidate, roles: tuple[PlacedUse, ...], staleness: int = 0
) -> Placement:
    """A candidate as the placement that a user would write; `staleness` need not be said.

    `*` stands for the first role, so that a model that no role has is placed as well.
    """
    names = _pool_names(candidate, roles)
    ranges = sorted(names)
    stops = [0, *(stop for _, stop in ranges)]
    beside = all(start == stop for (start, _), stop in zip(ranges, stops, strict=False))
    pools = {names[r]: r[1] - r[0] if beside else list(range(*r)) for r in ranges}
    assign: dict[str, On] = {}
    for role, choice in zip(roles, candidate.choices, strict=True):
        where = on_of(role, choice, names[choice.range])
        if not assign:
            assign["*"] = where.model_copy(update={"engine": None})
            if not EnginePlan.chosen(where).own_process:
                continue
        given = assign.get(role.model, assign["*"])
        if not role.trained:
            offload = None if given.offload == "optimizer" else given.offload
            given = given.model_copy(update={**OF_TRAINING, "offload": offload})
        if where != given:
            assign[role.key] = where
    said: dict[str, object] = {"pools": pools, "assign": assign}
    if candidate.staleness != staleness:
        said["staleness"] = candidate.staleness
    if candidate.stream != 1:
        said["stream"] = candidate.stream
    return Placement.model_validate(said)


def _pool_names(candidate: Candidate, roles: tuple[PlacedUse, ...]) -> Mapping[Range, str]:
    """A name for every range: `all`, or by what its roles do."""
    held: dict[Range, list[PlacedUse]] = {}
    for role, choice in zip(roles, candidate.choices, strict=True):
        held.setdefault(choice.range, []).append(role)
    if len(held) == 1:
        return dict.fromkeys(held, "all")
    several = Counter(_work(group) for group in held.values())
    names: dict[Range, str] = {}
    for where, group in held.items():
        work = _work(group)
        first = next(role.model for role in group if _work([role]) == work)
        name = work if several[work] == 1 else f"{work}_{first}"
        if work == "frozen" and len(group) == 1:
            name = first
        while name in names.values() or name == "host":
            name += "_pool"
        names[where] = name
    return names


def _work(group: Sequence[PlacedUse]) -> str:
    """What roles on the same devices do, the heaviest of it."""
    if any(role.trained for role in group):
        return "train"
    return "gen" if any(role.rollout for role in group) else "frozen"


def hand_written(placements: Mapping[str, Placement], count: int) -> dict[str, Placement]:
    """The placements of a pipeline, and each with pools so many times larger as there is room.

    Those in shares have all devices as they are.
    """
    found = dict(placements)
    for name, placement in placements.items():
        if placement.shares:
            continue
        times = count // placement.num_devices()
        if times > 1:
            found[f"{name} x{times}"] = scaled(placement, times)
    return found


def scaled(placement: Placement, times: int) -> Placement:
    """The placement with so many devices for each of its own; layouts that are said stay."""
    pools = {
        name: wanted * times
        if isinstance(wanted, int | str)
        else [device * times + part for device in wanted for part in range(times)]
        for name, wanted in placement.pools.items()
    }
    return placement.model_copy(update={"pools": pools})
