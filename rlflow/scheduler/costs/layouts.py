"""Which piece of a model each rank of an instance holds, and what a reshard has to move.

Pieces are fractions of classes of parameters, by how tensor parallelism cuts them (Shoeybi et al.
2019, section 3), and of experts, which lie whole; sizes of parameters are not needed. Nothing here
knows bytes, tensors or processes; the engines compute the same exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance

Cut = Literal["columns", "rows", "whole", "experts", "first", "last", "ends"]
Interval = tuple[Fraction, Fraction]
# Runs of layers, and of what `fsdp` cuts and of the other side of a parameter.
Box = tuple[tuple[Interval, ...], Interval, Interval]

CUTS: tuple[Cut, ...] = ("columns", "rows", "whole", "experts", "first", "last", "ends")
# Beside layers: an embedding, a head, and what is both.
BESIDE: tuple[Cut, ...] = ("first", "last", "ends")
WHOLE: Interval = (Fraction(0), Fraction(1))


def shares(shape: Shape, *, predicts: bool = True) -> dict[Cut, int]:
    """How many parameters `tp` cuts by outputs, by inputs, not at all, and by experts.

    The projections out of attention and out of the feed-forward layer are cut by their
    inputs, the rest by outputs, embedding and head by vocabulary. Norms are held whole. A dense
    layer, or a shared expert, of a mixture counts as cut by outputs. The `first` of a pipeline's
    stages has the embedding and the `last` the head; what is both is at both `ends`.
    """
    experts = shape.in_experts
    body = max(shape.parameters - shape.embedding - experts, 0)
    inside = shape.heads * shape.head_dim + (0 if experts else shape.ffn)
    by_inputs = min(shape.layers * shape.hidden * inside, body)
    norms = min(shape.norms, body - by_inputs)
    found: dict[Cut, int] = dict.fromkeys(CUTS, 0)
    words = min(shape.vocab * shape.hidden, shape.embedding)
    found["ends" if predicts and words == shape.embedding else "first"] = words
    found["last"] = shape.embedding - words
    columns = shape.parameters - experts - by_inputs - norms - shape.embedding
    return found | {"columns": columns, "rows": by_inputs, "whole": norms, "experts": experts}


def depth(instance: Instance, stage: int, how: Cut) -> tuple[Interval, ...]:
    """The parts of all layers that a place along pp has; all or none of what is beside them."""
    last = instance.pp - 1
    if how in BESIDE:
        there = (how != "last" and stage == 0) or (how != "first" and stage == last)
        return (WHOLE,) if there else ()
    runs = instance.runs
    total = runs[-1][-1].stop
    return tuple((Fraction(run.start, total), Fraction(run.stop, total)) for run in runs[stage])


def parameters_per_rank(
    instance: Instance, sizes: Mapping[Cut, int], stage: int | None = None
) -> int:
    """Parameters on each rank of a `stage`; without one, those of the fullest."""
    stages = range(instance.pp) if stage is None or instance.pp == 1 else (stage,)
    return max(_of_stage(instance, each, sizes) for each in stages)


def _of_stage(instance: Instance, stage: int, sizes: Mapping[Cut, int]) -> int:
    """Parameters on each rank of a stage."""
    held = {
        how: int(size * sum(map(_length, depth(instance, stage, how)), Fraction(0)))
        for how, size in sizes.items()
    }
    cut = sum(size for how, size in held.items() if how != "whole")
    return -(-(cut // instance.tp + held.get("whole", 0)) // instance.shards)


def held_parameters(
    instance: Instance, shape: Shape, *, predicts: bool = True, stage: int | None = None
) -> int:
    """Parameters on the first rank, which has most where a vocabulary does not divide by ranks.

    Ranks of an engine beyond the key-value heads repeat the projections to them.
    """
    words, width = shape.vocab, shape.embedding // max(shape.vocab, 1)
    of_layer = -(-words // instance.tp)
    rows = -(-of_layer // instance.shards)
    beyond = width * (rows - Fraction(words, instance.tp * instance.shards))
    repeated = shape.repeated_keys(instance.tp)
    held = parameters_per_rank(instance, shares(shape, predicts=predicts), stage)
    return held + int(beyond) + repeated


def piece(instance: Instance, device: int, how: Cut) -> Box:
    """The piece of a parameter that a device of the instance holds, as fractions of its sides.

    A stage has some of the layers. `fsdp` and `cp` cut the outputs of what `tp` leaves, of experts
    after neighbours along `ep`. An engine takes whole weights in one process for each replica, and
    shares them out itself.
    """
    if instance.engine_plan.in_process:
        side = (Fraction(0), Fraction(int(device in instance.owners)))
        return (side,), side, side
    place = instance.devices.index(device)
    layer, shard = place % instance.tp, place // instance.tp % instance.shards
    deep = depth(instance, instance.stage_of(device), how)
    if how == "whole":
        return deep, _part(WHOLE, shard, instance.shards), WHOLE
    if how == "experts":
        mine = _part(_part(WHOLE, layer, instance.tp), shard % instance.ep, instance.ep)
        return deep, _part(mine, shard // instance.ep, instance.shards // instance.ep), WHOLE
    if how == "rows":
        own = _part(WHOLE, layer, instance.tp)
        return deep, _part(WHOLE, shard, instance.shards), own
    return deep, _part(_part(WHOLE, layer, instance.tp), shard, instance.shards), WHOLE


def _part(interval: Interval, number: int, parts: int) -> Interval:
    start, stop = interval
    width = (stop - start) / parts
    return start + number * width, start + (number + 1) * width


def _common(one: Interval, other: Interval) -> Fraction:
    return max(Fraction(0), min(one[1], other[1]) - max(one[0], other[0]))


def _length(interval: Interval) -> Fraction:
    return interval[1] - interval[0]


def area(box: Box) -> Fraction:
    """The part of a parameter that a box is."""
    return shared_fraction(box, box)


def shared_fraction(one: Box, other: Box) -> Fraction:
    """The part of a parameter that two boxes have in common."""
    deep = sum((_common(a, b) for a in one[0] for b in other[0]), Fraction(0))
    sides = (_common(a, b) for a, b in zip(one[1:], other[1:], strict=True))
    return math.prod(sides, start=deep)


def lacking(source: Instance, target: Instance) -> dict[Cut, Fraction]:
    """How often each class of parameters has to come from another process, all ranks together.

    Sum over the target's ranks d of |need(d)| - |need(d) and hold(d)|, where need(d) is the
    target's piece and hold(d) the source's in the same process, nothing where it has none.
    """
    return {how: sum((_lacks(source, target, d, how) for d in target.devices), Fraction(0))
            for how in CUTS}  # fmt: skip


def _lacks(source: Instance, target: Instance, device: int, how: Cut) -> Fraction:
    need = piece(target, device, how)
    if device not in source.devices:
        return area(need)
    return area(need) - shared_fraction(need, piece(source, device, how))


def held_in_place(source: Instance, target: Instance) -> bool:
    """Whether every process of the target holds all that it needs in the source already."""
    return not any(_lacks(source, target, d, how) for d in target.devices for how in CUTS)
