"""Resharding as arithmetic: from the tables of two layouts, what moves from where to where.

For every rank of the target: the elements it lacks, cut along the boxes that ranks of the
source hold, each from one of them. This file imports no torch; it knows neither how bytes
travel nor what a model is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.contract.values import Box
from rlflow.engines.reshard.boxes import (
    Entry,
    Shape,
    contains,
    intersection,
    overlaps,
    refine,
    volume,
)
from rlflow.errors import Finding, RunError, known_names, near_names

Table = Mapping[str, Entry]
Names = frozenset[str] | None

ITEMSIZE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}


@dataclass(frozen=True, slots=True)
class TargetBox:
    """The target of that number, and the dtype that it holds the parameter in."""

    index: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One box of a parameter from a rank that holds it to one that wants it.

    The box is in whole coordinates. `dtype` is the one it travels in, `bytes` its size in that;
    `places` are all targets on the receiver that it belongs to. Where sender and receiver are
    one rank nothing travels.
    """

    sender: int
    receiver: int
    name: str
    box: Box
    bytes: int
    dtype: str
    places: tuple[TargetBox, ...]

    @property
    def travels(self) -> bool:
        """Whether it leaves the process."""
        return self.sender != self.receiver


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a parameter that a rank needs, and for which target."""

    box: Box
    place: TargetBox


@dataclass(slots=True)
class _Holding:
    """A parameter of the source: disjoint boxes, and which ranks hold each of them."""

    shape: Shape
    dtype: str
    held: dict[int, Box] = field(default_factory=dict)
    boxes: tuple[Box, ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()

    def settle(self) -> None:
        """Cut what the ranks hold into disjoint boxes."""
        ranks: dict[Box, list[int]] = {}
        for rank, box in self.held.items():
            ranks.setdefault(box, []).append(rank)
        self.boxes = refine(tuple(ranks))
        self.holders = tuple(
            tuple(sorted(r for box in ranks if contains(box, part) for r in ranks[box]))
            for part in self.boxes
        )


Wants = dict[str, dict[int, list[Want]]]


def plan_targets(
    source: Mapping[int, Table],
    targets: Sequence[Mapping[int, Table]],
    *,
    host_of: Mapping[int, str] | None = None,
    only: Names = None,
) -> tuple[Move, ...]:
    """The moves that make every target of `source`, tables by rank.

    Each element that a rank lacks reaches it once, also where several targets need it; what it
    holds itself is a move from it to itself. Of several holders the one sends that is on the
    receiver's host (`host_of`), then the one that has sent least so far, then the lowest. `only`
    limits the moves to those parameters. Raises RunError (E540, E541).
    """
    held = holdings(source)
    wants = wanted(held, targets, only)
    require_covered(held, wants)
    sent = dict.fromkeys(source, 0)
    hosts = host_of or {}
    moves = []
    for name, holding in held.items():
        for receiver, its in sorted(wants.get(name, {}).items()):
            for move in _moves(name, holding, receiver, its, sent, hosts):
                moves.append(move)
                sent[move.sender] += move.bytes if move.travels else 0
    return tuple(moves)


def minimum_bytes(source: Mapping[int, Table], target: Mapping[int, Table]) -> dict[int, int]:
    """For every rank of the target, the bytes of its boxes that it does not hold itself.

    An element counts in the smaller of its dtypes at the two ends.
    """
    held = holdings(source)
    needed = dict.fromkeys(target, 0)
    for name, by_rank in wanted(held, (target,), None).items():
        for receiver, wants in by_rank.items():
            own = held[name].held.get(receiver)
            for region, places in _regions(wants):
                common = None if own is None else intersection(region, own)
                lacking = volume(region) - (volume(common) if common is not None else 0)
                needed[receiver] += lacking * ITEMSIZE[_travelling(held[name].dtype, places)]
    return needed


def holdings(source: Mapping[int, Table]) -> dict[str, _Holding]:
    """The parameters of the source, in the order of the lowest rank that has each.

    Raises RunError (E541) where ranks disagree on a shape or a dtype, or a box is outside.
    """
    found: dict[str, _Holding] = {}
    for rank in sorted(source):
        for name, (shape, dtype, box) in source[rank].items():
            holding = found.setdefault(name, _Holding(tuple(shape), dtype))
            if (holding.shape, holding.dtype) != (tuple(shape), dtype):
                what = f"ranks of the source disagree on parameter {name!r}"
                got, expected = f"{dtype} {shape}", f"{holding.dtype} {holding.shape}"
                raise RunError(Finding(code="E541", what=what, got=got, expected=expected))
            require_box(name, tuple(shape), dtype, box)
            if volume(box):
                holding.held[rank] = box
    for holding in found.values():
        holding.settle()
    return found


def require_box(name: str, shape: Shape, dtype: str, box: Box) -> None:
    """Raise RunError (E541) unless the box lies within the shape and the dtype is known."""
    fits = len(box) == len(shape) and all(
        0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True)
    )
    if fits and dtype in ITEMSIZE:
        return
    what = f"a shard of parameter {name!r} cannot be moved"
    got = f"{dtype}, box {box}"
    expected = f"a box within {shape}, of {known_names(list(ITEMSIZE))}"
    raise RunError(Finding(code="E541", what=what, got=got, expected=expected))


def wanted(
    held: Mapping[str, _Holding], targets: Sequence[Mapping[int, Table]], only: Names
) -> Wants:
    """By parameter and rank, the boxes that the rank's targets want."""
    found: Wants = {}
    for index, target in enumerate(targets):
        for rank, table in target.items():
            for name, (shape, dtype, box) in table.items():
                require_box(name, tuple(shape), dtype, box)
                # A target may have more than what is sent, base weights beside adapters.
                if only is not None and name not in held:
                    continue
                require_alike(name, tuple(shape), held)
                if volume(box) and (only is None or name in only):
                    want = Want(box, TargetBox(index, dtype))
                    found.setdefault(name, {}).setdefault(rank, []).append(want)
    for name in sorted(only or ()):
        empty = name in held and not math.prod(held[name].shape)
        if name not in found and not empty:
            missing = "source has no" if name not in held else "targets take no"
            what = f"the {missing} parameter {name!r}, which is to be sent"
            raise RunError(Finding(code="E540", what=what, near=near_names(name, held)))
    return found


def require_alike(name: str, shape: Shape, held: Mapping[str, _Holding]) -> None:
    """Raise RunError (E540, E541) unless the source has the parameter, in that shape."""
    if name not in held:
        what = f"the source has no parameter {name!r}"
        raise RunError(Finding(code="E540", what=what, near=near_names(name, held)))
    if shape != held[name].shape:
        what = f"parameter {name!r} has another shape in the source"
        got, expected = str(shape), str(held[name].shape)
        raise RunError(Finding(code="E541", what=what, got=got, expected=expected))


def require_covered(held: Mapping[str, _Holding], wants: Wants) -> None:
    """Raise RunError (E540) for elements that a target wants and no rank holds."""
    for name, by_rank in wants.items():
        for rank, its in by_rank.items():
            for want in its:
                found = sum(volume(box) for _, box in overlaps(held[name].boxes, want.box))
                if found != volume(want.box):
                    what = f"no rank holds all of {name!r} that rank {rank} wants"
                    got = f"{found} of {volume(want.box)} elements of box {want.box}"
                    raise RunError(Finding(code="E540", what=what, got=got))


def _regions(wants: Sequence[Want]) -> Iterator[tuple[Box, tuple[TargetBox, ...]]]:
    """Disjoint boxes of what a rank wants of a parameter, and every place that each goes to."""
    for region in refine(tuple(dict.fromkeys(want.box for want in wants))):
        yield region, tuple(want.place for want in wants if contains(want.box, region))


def _travelling(source: str, places: Sequence[TargetBox]) -> str:
    """The dtype an element travels in: the targets' one where it is smaller, or the source's."""
    dtypes = {place.dtype for place in places}
    smaller = len(dtypes) == 1 and ITEMSIZE[min(dtypes)] < ITEMSIZE[source]
    return min(dtypes) if smaller else source


def _moves(
    name: str,
    holding: _Holding,
    receiver: int,
    wants: Sequence[Want],
    sent: Mapping[int, int],
    hosts: Mapping[int, str],
) -> Iterator[Move]:
    for region, places in _regions(wants):
        dtype = _travelling(holding.dtype, places)
        for at, piece in overlaps(holding.boxes, region):
            yield Move(
                sender=_sender(holding.holders[at], receiver, sent, hosts),
                receiver=receiver,
                name=name,
                box=piece,
                bytes=volume(piece) * ITEMSIZE[dtype],
                dtype=dtype,
                places=places,
            )


def _sender(
    holders: Sequence[int], receiver: int, sent: Mapping[int, int], hosts: Mapping[int, str]
) -> int:
    if receiver in holders:
        return receiver
    host = hosts.get(receiver)
    return min(holders, key=lambda rank: (hosts.get(rank) != host, sent[rank], rank))
