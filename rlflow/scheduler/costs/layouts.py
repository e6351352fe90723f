"""Which piece of a model each rank of an instance holds, and what a reshard has to move.

Pieces are fractions of classes of parameters, by how tensor parallelism cuts them (Shoeybi et al.
2019, section 3), and of experts, which lie whole; sizes of parameters are not needed. Nothing here
knows bytes, tensors or processes; the engines compute the same exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance

Cut = Literal["columns", "rows", "whole", "experts"]
Interval = tuple[Fraction, Fraction]
Box = tuple[Interval, Interval]

CUTS: tuple[Cut, ...] = ("columns", "rows", "whole", "experts")


def shares(shape: Shape) -> dict[Cut, int]:
    """How many parameters `tp` cuts by outputs, by inputs, not at all, and by experts.

    The projections out of attention and out of the feed-forward layer are cut by their
    inputs, the rest by outputs, embedding and head by vocabulary. Norms are held whole. A dense
    layer, or a shared expert, of a mixture counts as cut by outputs.
    """
    experts = shape.in_experts
    body = max(shape.parameters - shape.embedding - experts, 0)
    inside = shape.heads * shape.head_dim + (0 if experts else shape.ffn)
    by_inputs = min(shape.layers * shape.hidden * inside, body)
    norms = min(shape.norms, body - by_inputs)
    columns = shape.parameters - experts - by_inputs - norms
    return {"columns": columns, "rows": by_inputs, "whole": norms, "experts": experts}


def parameters_per_rank(instance: Instance, sizes: Mapping[Cut, int]) -> int:
    """Parameters on each rank, the largest rank's where they do not divide."""
    cut = sum(size for how, size in sizes.items() if how != "whole")
    return -(-(cut // instance.tp + sizes.get("whole", 0)) // instance.shards)


def held_parameters(instance: Instance, shape: Shape) -> int:
    """Parameters on the first rank, which has most where a vocabulary does not divide by ranks.

    Ranks of an engine beyond the key-value heads repeat the projections to them.
    """
    words, width = shape.vocab, shape.embedding // max(shape.vocab, 1)
    of_layer = -(-words // instance.tp)
    rows = -(-of_layer // instance.shards)
    beyond = width * (rows - Fraction(words, instance.tp * instance.shards))
    repeated = shape.repeated_keys(instance.tp)
    return parameters_per_rank(instance, shares(shape)) + int(beyond) + repeated


def piece(instance: Instance, device: int, how: Cut) -> Box:
    """The piece of a parameter that a device of the instance holds, as fractions of its sides.

    `fsdp` and `cp` cut the outputs of what `tp` leaves, of experts after neighbours along `ep`. An
    engine takes whole weights in one process for each replica, and shares them out itself.
    """
    if instance.engine_plan.in_process:
        side = (Fraction(0), Fraction(int(device in instance.owners)))
        return side, side
    place = instance.devices.index(device)
    layer, shard = place % instance.tp, place // instance.tp % instance.shards
    whole: Interval = (Fraction(0), Fraction(1))
    if how == "whole":
        return _part(whole, shard, instance.shards), whole
    if how == "experts":
        mine = _part(_part(whole, layer, instance.tp), shard % instance.ep, instance.ep)
        return _part(mine, shard // instance.ep, instance.shards // instance.ep), whole
    if how == "rows":
        return _part(whole, shard, instance.shards), _part(whole, layer, instance.tp)
    return _part(_part(whole, layer, instance.tp), shard, instance.shards), whole


def _part(interval: Interval, number: int, parts: int) -> Interval:
    start, stop = interval
    width = (stop - start) / parts
    return start + number * width, start + (number + 1) * width


def area(box: Box) -> Fraction:
    """The part of a parameter that a box is."""
    (top, bottom), (left, right) = box
    return (bottom - top) * (right - left)


def shared_fraction(one: Box, other: Box) -> Fraction:
    """The part of a parameter that two boxes have in common."""
    sides = [
        max(Fraction(0), min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(one, other, strict=True)
    ]
    return sides[0] * sides[1]


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
