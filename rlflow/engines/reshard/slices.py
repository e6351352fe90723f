"""Resharding as arithmetic: from the tables of two layouts, what moves from where to where.

For every rank of the target: the elements it lacks, cut along the boxes that ranks of the
source hold, each from one of them. This file imports no torch; it knows neither how bytes
travel nor what a model is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.engines.protocol import Box
from rlflow.engines.reshard.boxes import holds, meet, overlaps, refine, shift, volume
from rlflow.engines.reshard.fusions import Entry, FusionRule, Shape, Slice, slices_of
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
class Place:
    """A box of a target's parameter, in whole coordinates; `index` is the target's number."""

    index: int
    name: str
    box: Box
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One piece of a parameter from a rank that holds it to one that wants it.

    Boxes are in whole coordinates and have the same sizes. `dtype` is the one it travels in,
    `bytes` its size in that. `also` are more places on the receiver for the same elements.
    Where sender and receiver are one rank nothing travels.
    """

    sender: int
    receiver: int
    source: str
    source_box: Box
    target: str
    target_box: Box
    bytes: int
    dtype: str
    target_dtype: str
    index: int = 0
    also: tuple[Place, ...] = ()

    @property
    def travels(self) -> bool:
        """Whether it leaves the process."""
        return self.sender != self.receiver

    @property
    def places(self) -> tuple[Place, ...]:
        """Everywhere the elements belong on the receiver."""
        return (Place(self.index, self.target, self.target_box, self.target_dtype), *self.also)


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a source's parameter that a rank needs, and where it puts it."""

    box: Box
    place: Place


@dataclass(slots=True)
class Holding:
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
            tuple(sorted(r for box in ranks if holds(box, part) for r in ranks[box]))
            for part in self.boxes
        )


Wants = dict[str, dict[int, list[Want]]]


def plan_moves(
    source: Mapping[int, Table],
    target: Mapping[int, Table],
    *,
    rules: Sequence[FusionRule] = (),
    host_of: Mapping[int, str] | None = None,
) -> tuple[Move, ...]:
    """The moves that make `target` of `source`, tables by rank.

    Each element that a rank lacks reaches it once; what it holds itself is a move from it to
    itself. Of several holders the one sends that is on the receiver's host (`host_of`), then the
    one that has sent least so far, then the lowest. Raises RunError (E540, E541, E542).
    """
    return plan_targets(source, (target,), rules=rules, host_of=host_of)


def plan_targets(
    source: Mapping[int, Table],
    targets: Sequence[Mapping[int, Table]],
    *,
    rules: Sequence[FusionRule] = (),
    host_of: Mapping[int, str] | None = None,
    only: Names = None,
) -> tuple[Move, ...]:
    """The same for several targets in one pass: what two of them need on a rank moves once.

    `only` limits the moves to those parameters of the source.
    """
    held = holdings(source)
    wants = wanted(held, targets, rules, only)
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


def minimum_bytes(
    source: Mapping[int, Table], target: Mapping[int, Table], rules: Sequence[FusionRule] = ()
) -> dict[int, int]:
    """For every rank of the target, the bytes of its boxes that it does not hold itself.

    An element counts in the smaller of its dtypes at the two ends, and once however many
    parameters of the target are made of it.
    """
    held = holdings(source)
    needed = dict.fromkeys(target, 0)
    for name, by_rank in wanted(held, (target,), rules, None).items():
        for receiver, wants in by_rank.items():
            own = held[name].held.get(receiver)
            for region, places in _regions(wants):
                common = None if own is None else meet(region, own)
                lacking = volume(region) - (volume(common) if common is not None else 0)
                needed[receiver] += lacking * ITEMSIZE[_travelling(held[name].dtype, places)]
    return needed


def holdings(source: Mapping[int, Table]) -> dict[str, Holding]:
    """The parameters of the source, in the order of the lowest rank that has each.

    Raises RunError (E541) where ranks disagree on a shape or a dtype, or a box is outside.
    """
    found: dict[str, Holding] = {}
    for rank in sorted(source):
        for name, (shape, dtype, box) in source[rank].items():
            holding = found.setdefault(name, Holding(tuple(shape), dtype))
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
    held: Mapping[str, Holding],
    targets: Sequence[Mapping[int, Table]],
    rules: Sequence[FusionRule],
    only: Names,
) -> Wants:
    """By parameter of the source and rank, the boxes that the rank's targets are made of."""
    shapes = {name: holding.shape for name, holding in held.items()}
    found: Wants = {}
    for index, target in enumerate(targets):
        for rank, table in target.items():
            for name, entry in table.items():
                for part in _slices(name, entry, shapes, rules, only):
                    want = Want(part.source_box, Place(index, name, part.target_box, entry[1]))
                    found.setdefault(part.source, {}).setdefault(rank, []).append(want)
    for name in sorted(only or ()):
        empty = name in shapes and not math.prod(shapes[name])
        if name not in found and not empty:
            missing = "source has no" if name not in shapes else "targets take no"
            what = f"the {missing} parameter {name!r}, which is to be sent"
            raise RunError(Finding(code="E540", what=what, near=near_names(name, shapes)))
    return found


def _slices(
    name: str,
    entry: Entry,
    shapes: Mapping[str, Shape],
    rules: Sequence[FusionRule],
    only: Names,
) -> Iterator[Slice]:
    shape, dtype, box = entry
    require_box(name, tuple(shape), dtype, box)
    try:
        parts = slices_of(name, tuple(shape), box, shapes, rules)
    except RunError as error:
        # A target may have more than what is sent, base weights beside adapters.
        if only is not None and error.findings[0].code == "E540":
            return
        raise
    yield from (part for part in parts if only is None or part.source in only)


def require_covered(held: Mapping[str, Holding], wants: Wants) -> None:
    """Raise RunError (E540) for elements that a target wants and no rank holds."""
    for name, by_rank in wants.items():
        for rank, its in by_rank.items():
            for want in its:
                found = sum(volume(box) for _, box in overlaps(held[name].boxes, want.box))
                if found != volume(want.box):
                    what = f"no rank holds all of {name!r} that rank {rank} wants"
                    got = f"{found} of {volume(want.box)} elements of box {want.box}"
                    raise RunError(Finding(code="E540", what=what, got=got))


def _regions(wants: Sequence[Want]) -> Iterator[tuple[Box, list[Place]]]:
    """Disjoint boxes of what a rank wants of a parameter, and every place that each goes to."""
    for region in refine(tuple(dict.fromkeys(want.box for want in wants))):
        takers = [want for want in wants if holds(want.box, region)]
        yield region, [_within(want.place, region, want.box) for want in takers]


def _within(place: Place, part: Box, box: Box) -> Place:
    """Where `part` of a box goes, when the box goes to `place`."""
    return Place(place.index, place.name, shift(part, box, place.box), place.dtype)


def _travelling(source: str, places: Sequence[Place]) -> str:
    """The dtype an element travels in: the targets' one where it is smaller, or the source's."""
    dtypes = {place.dtype for place in places}
    smaller = len(dtypes) == 1 and ITEMSIZE[min(dtypes)] < ITEMSIZE[source]
    return min(dtypes) if smaller else source


def _moves(
    name: str,
    holding: Holding,
    receiver: int,
    wants: Sequence[Want],
    sent: Mapping[int, int],
    hosts: Mapping[int, str],
) -> Iterator[Move]:
    for region, places in _regions(wants):
        dtype = _travelling(holding.dtype, places)
        for at, piece in overlaps(holding.boxes, region):
            put = [_within(place, piece, region) for place in places]
            yield Move(
                sender=_sender(holding.holders[at], receiver, sent, hosts),
                receiver=receiver,
                source=name,
                source_box=piece,
                target=put[0].name,
                target_box=put[0].box,
                bytes=volume(piece) * ITEMSIZE[dtype],
                dtype=dtype,
                target_dtype=put[0].dtype,
                index=put[0].index,
                also=tuple(put[1:]),
            )


def _sender(
    holders: Sequence[int], receiver: int, sent: Mapping[int, int], hosts: Mapping[int, str]
) -> int:
    if receiver in holders:
        return receiver
    host = hosts.get(receiver)
    return min(holders, key=lambda rank: (hosts.get(rank) != host, sent[rank], rank))
