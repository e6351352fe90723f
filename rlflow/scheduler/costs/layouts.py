"""Which piece of a model each rank of an instance holds, and what a reshard has to move.

Pieces are parts of classes of parameters, by how tensor parallelism cuts them (Shoeybi et al.
2019, section 3), and of experts, which lie whole; sizes of parameters are not needed. Nothing here
knows bytes, tensors or processes; the engines compute the same exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, get_args

from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance

Cut = Literal["columns", "rows", "whole", "experts", "tower", "first", "last", "ends"]
# The first part of a side, and the one after the last.
Interval = tuple[int, int]
# Runs of layers, and of what `fsdp` cuts and of the other side of a parameter.
Box = tuple[tuple[Interval, ...], Interval, Interval]
# Into how many parts these three are cut.
Grid = tuple[int, int, int]

CUTS: tuple[Cut, ...] = get_args(Cut)
# Beside layers: what sees pictures, an embedding, a head, and what is both.
BESIDE: tuple[Cut, ...] = ("tower", "first", "last", "ends")
# Of which every rank along tp has all.
UNCUT: tuple[Cut, ...] = ("whole", "tower")


def shares(shape: Shape, *, predicts: bool = True) -> dict[Cut, int]:
    """How many parameters `tp` cuts by outputs, by inputs, not at all, and by experts.

    The projections out of attention and out of the feed-forward layer are cut by their
    inputs, the rest by outputs, embedding and head by vocabulary. Norms and routers are held
    whole. A dense layer, or a shared expert, of a mixture counts as cut by outputs. The `first` of
    a pipeline's stages has the embedding and the `last` the head; what is both is at both `ends`.
    What sees is a `tower`, which is at the first stage.
    """
    experts = shape.in_experts
    body = max(shape.parameters - shape.embedding - experts - shape.tower, 0)
    inside = shape.heads * shape.head_dim + (0 if experts else shape.ffn)
    by_inputs = min(shape.layers * shape.hidden * inside, body)
    uncut = min(shape.norms + shape.routers, body - by_inputs)
    found: dict[Cut, int] = dict.fromkeys(CUTS, 0)
    words = min(shape.vocab * shape.hidden, shape.embedding)
    found["ends" if predicts and words == shape.embedding else "first"] = words
    found["last"] = shape.embedding - words
    columns = shape.parameters - experts - by_inputs - uncut - shape.embedding - shape.tower
    found |= {"columns": columns, "rows": by_inputs, "whole": uncut, "experts": experts}
    return found | {"tower": shape.tower}


def depth(instance: Instance, stage: int, how: Cut, layers: int) -> tuple[Interval, ...]:
    """Which of so many `layers` a place along pp has; all or none of what is beside them."""
    last = instance.pp - 1
    if how in BESIDE:
        ends = (how in ("last", "ends")) and stage == last
        there = ends or (how != "last" and stage == 0)
        return ((0, layers),) if there else ()
    if instance.pp == 1:
        return ((0, layers),)
    runs = instance.runs
    each = layers // runs[-1][-1].stop
    return tuple((run.start * each, run.stop * each) for run in runs[stage])


def parameters_per_rank(
    instance: Instance, sizes: Mapping[Cut, int], stage: int | None = None
) -> int:
    """Parameters on each rank of a `stage`; without one, those of the fullest."""
    stages = range(instance.pp) if stage is None or instance.pp == 1 else (stage,)
    return max(_of_stage(instance, each, sizes) for each in stages)


def _of_stage(instance: Instance, stage: int, sizes: Mapping[Cut, int]) -> int:
    """Parameters on each rank of a stage; an engine's ranks cut a tower as they cut layers."""
    layers, cut, whole = instance.runs[-1][-1].stop, 0, 0
    for how, size in sizes.items():
        held = size * _length(depth(instance, stage, how, layers)) // layers
        all_of = how in UNCUT and not (how == "tower" and instance.engine_plan.in_process)
        cut, whole = (cut, whole + held) if all_of else (cut + held, whole)
    return -(-(cut // instance.tp + whole) // instance.shards)


def held_parameters(
    instance: Instance, shape: Shape, *, predicts: bool = True, stage: int | None = None
) -> int:
    """Parameters on the first rank, which has most where a vocabulary does not divide by ranks.

    Ranks of an engine beyond the key-value heads repeat the projections to them.
    """
    words, width = shape.vocab, shape.embedding // max(shape.vocab, 1)
    of_layer = -(-words // instance.tp)
    rows, ranks = -(-of_layer // instance.shards), instance.tp * instance.shards
    beyond = width * (rows * ranks - words) // ranks
    held = parameters_per_rank(instance, shares(shape, predicts=predicts), stage)
    return held + beyond + shape.repeated_keys(instance.tp)


def grid_of(*instances: Instance) -> Grid:
    """Into how many parts sides are cut so that pieces of the instances are whole ones."""
    layers = (each.runs[-1][-1].stop for each in instances)
    ranks = (each.tp * each.shards for each in instances)
    return math.lcm(*layers), math.lcm(*ranks), math.lcm(*(each.tp for each in instances))


def piece(instance: Instance, rank: int, how: Cut, grid: Grid) -> Box:
    """The piece of a parameter that a rank of the instance holds, in parts of the `grid`.

    A stage has some of the layers. `fsdp` and `cp` cut the outputs of what `tp` leaves, of experts
    after neighbours along `ep`. An engine takes whole weights in one process for each replica, and
    shares them out itself.
    """
    layers, outputs, inputs = grid
    if instance.engine_plan.in_process:
        owns = instance.owns(rank)
        return ((0, layers * owns),), (0, outputs * owns), (0, inputs * owns)
    layer, shard = rank % instance.tp, rank // instance.tp % instance.shards
    deep = depth(instance, rank // instance.stage_ranks % instance.pp, how, layers)
    if how in UNCUT:
        return deep, _part((0, outputs), shard, instance.shards), (0, inputs)
    if how == "experts":
        mine = _part(_part((0, outputs), layer, instance.tp), shard % instance.ep, instance.ep)
        own = _part(mine, shard // instance.ep, instance.shards // instance.ep)
        return deep, own, (0, inputs)
    if how == "rows":
        own = _part((0, inputs), layer, instance.tp)
        return deep, _part((0, outputs), shard, instance.shards), own
    own = _part(_part((0, outputs), layer, instance.tp), shard, instance.shards)
    return deep, own, (0, inputs)


def _part(interval: Interval, number: int, parts: int) -> Interval:
    start, stop = interval
    width = (stop - start) // parts
    return start + number * width, start + (number + 1) * width


def _length(runs: tuple[Interval, ...]) -> int:
    return sum(stop - start for start, stop in runs)


def size(box: Box) -> int:
    """The parts of a grid that are in a box."""
    deep, outputs, inputs = box
    return _length(deep) * _length((outputs,)) * _length((inputs,))


def common(one: Box, other: Box) -> int:
    """The parts of a grid that two boxes have in common."""
    deep = sum(_met(a, b) for a in one[0] for b in other[0])
    return deep * _met(one[1], other[1]) * _met(one[2], other[2])


def _met(one: Interval, other: Interval) -> int:
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0)


def lacking(source: Instance | None, target: Instance) -> dict[Cut, Fraction]:
    """How often each class of parameters has to come from another process, all ranks together.

    Sum over the target's ranks d of |need(d)| - |need(d) and hold(d)|, where need(d) is the
    target's piece and hold(d) the source's in the same process, nothing where it has none. Without
    a source it is all that the target holds.
    """
    grid = grid_of(*(each for each in (source, target) if each is not None))
    ranks = {} if source is None else {device: rank for rank, device in enumerate(source.devices)}
    found = dict.fromkeys(CUTS, Fraction(0))
    for how in CUTS:
        missing = 0
        for rank, device in enumerate(target.devices):
            need = piece(target, rank, how, grid)
            missing += size(need)
            if source is not None and device in ranks:
                missing -= common(need, piece(source, ranks[device], how, grid))
        found[how] = Fraction(missing, math.prod(grid))
    return found


def held_in_place(source: Instance, target: Instance) -> bool:
    """Whether every process of the target holds all that it needs in the source already."""
    return not any(lacking(source, target).values())
