"""How an instance computes so that what it holds fits its devices, where nobody has said it.

A forward or backward goes over a batch in micro-batches of whole rows; gradients are those of
the whole batch, to the rounding of sums. Where no micro-batch is small enough a backward computes
layers again, or an optimizer's state stays on the host, or both: what takes least by the estimate.
This file knows sizes and seconds, and no other instance's memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from rlflow.graph.graph import Node
from rlflow.modelfiles.families import sequence_finding
from rlflow.modelfiles.hosted import in_pieces
from rlflow.modelfiles.paging import MOST_ROWS
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.measured import NOTHING
from rlflow.scheduler.plan.plan import Instance

LEAST_TOKENS = 1024
NO_ROOMS: Mapping[str, int] = MappingProxyType({})

Fits = Callable[[Instance], bool]


def fitted_to_room(
    instance: Instance,
    nodes: Sequence[Node],
    room: int,
    costs: Costs,
    *,
    rooms: Mapping[str, int] = NO_ROOMS,
    free: bool = False,
    sequence: bool | None = None,
) -> Instance:
    """`in_micro_batches`, with ranks along `tp` that share the `sequence`, or all have all tokens.

    Where nobody says which, accelerators do what takes less, and what fits: that is decided by
    shapes and tables, not by measurements, which are of one layout.
    """
    fit = partial(in_micro_batches, nodes=nodes, room=room, costs=costs, rooms=rooms, free=free)
    if instance.tp == 1 or set(instance.uses) == {"rollout"}:
        return fit(instance)
    shared = replace(instance, sequence=True)
    if sequence is not None:
        return fit(shared if sequence else instance)
    shape = costs.shapes[instance.model]
    if shape is None or sequence_finding("", shape.family) or costs.cluster.is_cpu:
        return fit(instance)
    tables = without_measurements(costs)

    def worth(way: Instance) -> tuple[bool, float]:
        return not fits_in(way, nodes, costs, room, rooms), instance_seconds(way, nodes, tables)

    return min(fit(shared), fit(instance), key=worth)


def without_measurements(costs: Costs) -> Costs:
    """The estimates without measurements; themselves where there are none."""
    if not costs.cluster.measured.records:
        return costs
    return Costs(
        graph=costs.graph,
        cluster=replace(costs.cluster, measured=NOTHING),
        shapes=costs.shapes,
        backend=costs.backend,
        staleness=costs.staleness,
        prompts=costs.prompts,
    )


def in_micro_batches(
    instance: Instance,
    nodes: Sequence[Node],
    room: int,
    costs: Costs,
    *,
    rooms: Mapping[str, int] = NO_ROOMS,
    free: bool = False,
) -> Instance:
    """The instance with micro-batches as large as fit `room` bytes; if none do, what needs least.

    Nodes that have `rooms`, by their names, have to fit those.
    They are halved from the instance's own down, and no smaller than needed. Where none fits, an
    optimizer's state stays on the host, unless that is where the devices have their memory; and
    where the instance is `free` to, a backward computes layers again. A pool of blocks has slots
    for as many rows as fit.
    """
    instance = with_rows(instance, nodes, room, costs, rooms)

    def fits(tried: Instance) -> bool:
        return fits_in(tried, nodes, costs, room, rooms)

    found = largest_fit(instance, fits)
    if found is not None:
        return filling_stages(found, nodes, costs)
    least = replace(instance, micro_tokens=min(LEAST_TOKENS, instance.micro_tokens))
    if not instance.trained:
        return least
    ways = [instance]
    if instance.offload is None and not costs.cluster.is_cpu:
        ways.append(replace(instance, offload="optimizer"))
    shape = costs.shapes[instance.model]
    layers = shape.layers if free and shape is not None else 0
    fitting = [fit for way in ways for fit in ways_of(way, layers, fits)]
    if fitting:
        fast = min(fitting, key=lambda fit: instance_seconds(fit, nodes, costs))
        return filling_stages(fast, nodes, costs)
    again = [least, replace(least, recompute=True)] if layers else [least]
    tried = (replace(each, offload=way.offload) for way in ways for each in again)

    def lacking(way: Instance) -> int:
        return max(needed(node, way, costs) - rooms.get(node.name, room) for node in nodes)

    return min(tried, key=lacking)


def with_rows(
    instance: Instance,
    nodes: Sequence[Node],
    room: int,
    costs: Costs,
    rooms: Mapping[str, int] = NO_ROOMS,
) -> Instance:
    """The instance with slots for as many rows of its rollouts as fit `room` bytes, if any do.

    Rows of a prompt decode together, so they are a multiple of those where one rollout has blocks.
    """
    paged = [node for node in nodes if _in_blocks(node, instance, costs)]

    def of(rows: int) -> Instance:
        return replace(instance, rows_at_once=rows)

    def too_many(rows: int) -> bool:
        return any(needed(n, of(rows), costs) > rooms.get(n.name, room) for n in paged)

    if not too_many(instance.rows_at_once):
        return instance
    each = max(costs.load(n, row_parts(n, instance)).in_blocks().n for n in paged)
    counts = range(each, MOST_ROWS + 1, each)
    found = bisect_left(counts, True, key=too_many)
    return of(counts[max(found - 1, 0)])


def _in_blocks(node: Node, instance: Instance, costs: Costs) -> bool:
    """Whether a node generates with keys and values in blocks of a pool."""
    shape = costs.shapes[instance.model]
    if node.op.use != "rollout" or shape is None:
        return False
    return costs.roofline_of(node, instance, shape).paged


def ways_of(way: Instance, layers: int, fits: Fits) -> Iterator[Instance]:
    """The ways of an instance that fit: plain, and with the fewest of so many layers recomputed.

    The last layer is computed again for nothing: its backward comes first, and finds of it what it
    would have kept. So all layers but that one take the least.
    """
    plain = largest_fit(way, fits)
    if plain is not None:
        yield plain
    most = layers - 1  # That smaller micro-batches want.
    for tokens in micro_sizes(way) if layers > 1 else ():
        sized = replace(way, micro_tokens=tokens)
        if not fits(replace(sized, recompute_first=most)):
            continue
        fits_with = partial(_fits_with, sized, fits)
        most = 1 + bisect_left(range(1, most), True, key=fits_with)
        yield replace(sized, recompute_first=most)
    selective = largest_fit(replace(way, recompute="selective"), fits) if layers else None
    if selective is not None:
        yield selective


def _fits_with(way: Instance, fits: Fits, layers: int) -> bool:
    """Whether it fits where so many layers are computed again."""
    return fits(replace(way, recompute_first=layers))


def largest_fit(way: Instance, fits: Fits) -> Instance | None:
    """The instance with the largest micro-batches that fit, if any do."""
    tried = (replace(way, micro_tokens=tokens) for tokens in micro_sizes(way))
    return next(filter(fits, tried), None)


def filling_stages(fit: Instance, nodes: Sequence[Node], costs: Costs) -> Instance:
    """The instance with smaller micro-batches where these take less, as more fill a pipeline."""
    if fit.pp == 1:
        return fit
    tried = (replace(fit, micro_tokens=tokens) for tokens in micro_sizes(fit))
    return min(tried, key=lambda way: instance_seconds(way, nodes, costs))


def micro_sizes(instance: Instance) -> Iterator[int]:
    """Tokens of micro-batches, the most that the instance may have first."""
    tokens = instance.micro_tokens
    yield tokens
    while (tokens := tokens // 2) >= LEAST_TOKENS:
        yield tokens


def instance_seconds(instance: Instance, nodes: Sequence[Node], costs: Costs) -> float:
    """Seconds that the nodes of an instance take in an iteration."""
    return sum(
        (costs.table(node, instance, row_parts(node, instance)).seconds or 0.0) / node.every
        for node in nodes
    )


def row_parts(node: Node, instance: Instance) -> int:
    """How many parts of the rows a node's ranks have."""
    return instance.row_parts if node.op.dispatched not in ("all", "first") else 1


def needed(node: Node, instance: Instance, costs: Costs) -> int:
    """Bytes on each device while a node runs with nothing else awake; unknown sizes count 0."""
    held = costs.held(node, instance, row_parts(node, instance))
    return _state_held(node, instance, costs) + held


def fits_in(
    instance: Instance,
    nodes: Sequence[Node],
    costs: Costs,
    room: int,
    rooms: Mapping[str, int] = NO_ROOMS,
) -> bool:
    """Whether each node fits so many bytes, or those of its name, with nothing else awake."""
    return all(
        _state_held(node, instance, costs) <= there and needed(node, instance, costs) <= there
        for node, there in ((node, rooms.get(node.name, room)) for node in nodes)
    )


def _state_held(node: Node, instance: Instance, costs: Costs) -> int:
    """Bytes of what a node runs with that do not depend on its rows."""
    held = costs.weights(instance) or 0
    if node.op.use == "train":
        held += (costs.gradients(instance) or 0) + (costs.moments(instance) or 0)
    return held


def hosted_activations(instance: Instance, nodes: Sequence[Node], costs: Costs) -> int | None:
    """Bytes of host memory for each device that activations of an update lie in, in pieces."""
    shape = costs.shapes[instance.model]
    if shape is None:
        return None
    most = 0.0
    for node in (each for each in nodes if each.op.use == "train"):
        roof = costs.roofline_of(node, instance, shape)
        tokens = roof.most_tokens(costs.load(node, instance.row_parts))
        for stage, _ in roof.stages:
            sent = stage.in_flight * stage.layers.sent(tokens, instance.recomputes)
            most = max(most, sent)
    return in_pieces(int(most))
