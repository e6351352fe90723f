"""What would make a placement fit that is refused for memory: its neighbours, tried one by one.

A neighbour says another layout for one use of a model, samples in one piece, or has more devices
in every pool. Where none fits, the one that lacks least is changed again. Nothing is shown that was
not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.graph.placement import On, Placement
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import Cluster, amount
from rlflow.scheduler.models.shapes import Shape, model_shape
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.too_large import TooLarge
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.plan import HOST, MICRO_TOKENS, Backend, Plan
from rlflow.scheduler.plan.text import duration, table
from rlflow.scheduler.search.layouts import ENGINE_PARALLEL, TENSOR_PARALLEL, contexts_on
from rlflow.scheduler.search.space import scaled
from rlflow.scheduler.search.text import on_source

ROUNDS = 3
SHOWN = 3
TIMES = (2, 4, 8, 16)
EXPERT_PARALLEL = (2, 4, 8, 16)
MOST_PLANS, LEAST_PLANS = 48, 12
NODES_TIMES_DEVICES = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A placement on a cluster, where other layouts than before are `said` of some uses.

    It has a `plan`, or `lacks` so many bytes on devices, all actions that do not fit together.
    """

    placement: Placement
    cluster: Cluster
    said: Mapping[str, On]
    plan: Plan | None = None
    lacks: int = 0


@dataclass(slots=True, kw_only=True)
class Neighbourhood:
    """The neighbours of a placement, as far as `most` plans go; models lie `near` the pipeline."""

    graph: Graph
    placement: Placement
    cluster: Cluster
    near: Path | None
    backend: Backend | None
    most: int
    tried: int = 0

    @property
    def count(self) -> int:
        """The devices of the placement."""
        placed = self.placement
        return self.cluster.count if placed.shares else placed.num_devices()

    def fitting(self) -> tuple[list[Neighbour], Neighbour | None]:
        """Those that fit, with fewest changes first; where no layout does, the nearest of them."""
        found: list[Neighbour] = []
        nearest: Neighbour | None = None
        said: Mapping[str, On] = {}
        for _ in range(ROUNDS):
            made = [self._tried(layouts, 1) for layouts in self._layouts(said)]
            if self.placement.stream not in (1, "auto"):
                made.append(self._tried(said, 1, pieces=1))
            known = [each for each in made if each is not None]
            found += [each for each in known if each.plan is not None]
            closest = min(known, key=lambda each: each.lacks, default=None)
            if found or closest is None or (nearest and closest.lacks >= nearest.lacks):
                break
            nearest, said = closest, closest.said
        found.sort(key=_period)
        sets = [{}] if found or not said else [{}, said]
        more = (self._tried(each, times) for times in TIMES for each in sets)
        larger = next((each for each in more if each and each.plan is not None), None)
        return [*found[: SHOWN - (larger is not None)], *([larger] if larger else [])], nearest

    def _tried(
        self, said: Mapping[str, On], times: int, pieces: int | None = None
    ) -> Neighbour | None:
        """A neighbour, compiled; None where it is refused for anything but memory of devices."""
        cluster = self.cluster.enlarged(self.count * times)
        if cluster is None or self.most <= self.tried:
            return None
        self.tried += 1
        placement = self.placement
        if times > 1 and not placement.shares:
            placement = scaled(placement, times)
        changed = {"assign": {**placement.assign, **said}, "stream": pieces or placement.stream}
        placement = placement.model_copy(update=changed)
        made = Neighbour(placement=placement, cluster=cluster, said=said)
        try:
            return replace(made, plan=self.compiled(made))
        except PlanError as error:
            lacks = bytes_lacking(error)
            return None if lacks is None else replace(made, lacks=lacks)

    def compiled(self, neighbour: Neighbour, *, verified: bool = False) -> Plan:
        """Its plan. Raises PlanError where it is refused."""
        return compile_plan(
            self.graph,
            neighbour.placement,
            neighbour.cluster,
            near=self.near,
            backend=self.backend,
            verified=verified,
        ).plan

    def _layouts(self, said: Mapping[str, On]) -> Iterator[Mapping[str, On]]:
        """What is said, and one layout more."""
        assign = {**self.placement.assign, **said}
        now = self.placement.model_copy(update={"assign": assign})
        seen: set[str] = set()
        for node in self.graph.nodes:
            where = assignment(node, now)
            if node.model is None or node.op.use is None or where is None:
                continue
            key = node.name if node.name in assign else f"{node.model}.{node.op.use}"
            if key not in seen:
                seen.add(key)
                frozen = not self.graph.updates(node.model)
                shape = model_shape(self.graph.model(node.model), self.near)
                others = other_layouts(
                    node.op.use,
                    where,
                    frozen=frozen,
                    on_host=self.cluster.is_cpu,
                    experts=0 if shape is None else shape.experts,
                    contexts=self._contexts(node, where, shape),
                )
                yield from ({**said, key: other} for other in others)

    def _contexts(self, node: Node, where: On, shape: Shape | None) -> list[int]:
        """Over how many ranks the rows of a node may be cut, if they are longer than a pass."""
        costs = Costs(graph=self.graph, cluster=self.cluster, shapes={str(node.model): shape})
        if node.op.use == "rollout" or costs.load(node, 1).longest_row <= MICRO_TOKENS:
            return []
        most = self.count // (where.tp or 1)
        return [cp for cp in contexts_on(shape, most, where.tp or 1, most) if cp > (where.cp or 1)]


def other_layouts(
    use: str,
    where: On,
    *,
    frozen: bool,
    on_host: bool,
    experts: int = 0,
    contexts: Sequence[int] = (),
) -> Iterator[On]:
    """Layouts of a use that take less of each device: shared by more ranks, or not there at all.

    Devices whose memory is the host's, `on_host`, gain nothing by what is kept there. So many
    `experts` of a layer may lie apart, and tokens of rows on as many ranks as `contexts` say.
    """
    for cp in contexts:
        yield where.model_copy(update={"cp": cp, "cp_by": None, "fsdp": None})
    for ep in EXPERT_PARALLEL if use == "train" else ():
        if experts and experts % ep == 0 and ep > (where.ep or 1):
            yield where.model_copy(update={"ep": ep})
    for tp in ENGINE_PARALLEL if EnginePlan.chosen(where).own_process else TENSOR_PARALLEL:
        if tp > (where.tp or 1):
            yield where.model_copy(update={"tp": tp})
    if use == "train":
        if where.fsdp is not None:
            yield where.model_copy(update={"fsdp": None})
        for again in ("selective", True):
            if where.recompute not in (again, True):
                yield where.model_copy(update={"recompute": again})
        for there in () if on_host else ("optimizer", "activations"):
            if there not in where.offloads:
                yield On.model_validate({**dict(where), "offload": (*where.offloads, there)})
    if use == "forward" and frozen and where.offload is None and not where.tp:
        yield where.model_copy(update={"offload": "layers"})


def bytes_lacking(error: PlanError) -> int | None:
    """Bytes that actions lack on devices, if that is all that an error says."""
    sizes = [each.lacks for each in error.findings if isinstance(each, TooLarge)]
    return sum(sizes) if len(sizes) == len(error.findings) else None


def with_remedies(
    error: PlanError,
    graph: Graph,
    placement: Placement,
    cluster: Cluster,
    *,
    near: Path | None = None,
    backend: Backend | None = None,
) -> PlanError:
    """The error with what would fit in the place of what might; as it is if it is of other things.

    At most `MOST_PLANS` plans are made, fewer of large graphs on many devices.
    """
    if bytes_lacking(error) is None:
        return error
    size = max(1, len(graph.nodes) * cluster.count)
    around = Neighbourhood(
        graph=graph,
        placement=placement,
        cluster=cluster,
        near=near,
        backend=backend,
        most=min(MOST_PLANS, max(LEAST_PLANS, NODES_TIMES_DEVICES // size)),
    )
    fitting, nearest = around.fitting()
    rows = [row for each in fitting if (row := _shown(each, around)) is not None]
    first, *rest = error.findings
    if rows:
        fix = "\n".join(["any of these fits:", *table(rows)])
    else:
        fix = "\n".join([_none_fits(around, nearest), first.fix])
    others: Sequence[Finding] = [replace(finding, fix="") for finding in rest]
    return PlanError(replace(first, fix=fix), *others, summary=error.summary)


def _period(neighbour: Neighbour) -> float:
    plan = neighbour.plan
    return plan.timing.seconds if plan is not None and plan.timing else float("inf")


def _shown(neighbour: Neighbour, around: Neighbourhood) -> tuple[str, ...] | None:
    """What to write, and the seconds and memory of its plan, which is verified."""
    try:
        plan = around.compiled(neighbour, verified=True)
    except PlanError:  # What is refused by a rule that rough plans are not asked.
        return None
    peak = max(size for device, size in plan.peaks.items() if device != HOST)
    seconds = "" if plan.timing is None else f"{duration(plan.timing.seconds)} an iteration"
    return _written(neighbour, around), seconds, f"{amount(peak)} at most"


def _written(neighbour: Neighbour, around: Neighbourhood) -> str:
    """What to write into the placement, or the devices to ask for."""
    words = [f'"{key}": {on_source(where)}' for key, where in neighbour.said.items()]
    if neighbour.placement.stream != around.placement.stream:
        words.append(f"stream={neighbour.placement.stream}")
    pools = dict(neighbour.placement.pools)
    if pools != around.placement.pools:
        words.append(f"pools={pools}")
    if neighbour.cluster.count > around.cluster.count:
        words.append(f"--devices {neighbour.cluster.kind.name}:{neighbour.cluster.count}")
    return ", ".join(words)


def _none_fits(around: Neighbourhood, nearest: Neighbour | None) -> str:
    text = f"none of {around.tried} other layouts and larger clusters that were tried fits"
    if nearest is None:
        return text
    return f"{text}; the nearest lacks {amount(nearest.lacks)}: {_written(nearest, around)}"
