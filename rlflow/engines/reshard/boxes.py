"""Boxes: axis-aligned pieces of a parameter, as (start, stop) per dimension.

Plain tuples of numbers and no tensors. The box of a parameter without dimensions is `()` and
has one element. This file knows neither ranks nor names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from rlflow.contract.values import Box

Shape = tuple[int, ...]
# A parameter as a rank has it: its whole shape, the name of its dtype, and the rank's box.
Entry = tuple[Shape, str, Box]


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box of all elements."""
    return tuple((0, length) for length in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """The length of every dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements it has."""
    return math.prod(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one parameter have in common; None where that is nothing."""
    found = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return found if all(start < stop for start, stop in found) else None


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` is in `outer`."""
    pairs = zip(outer, inner, strict=True)
    return all(s <= t and f <= e for (s, e), (t, f) in pairs)


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of `a` that are not in `b`, as disjoint boxes."""
    common = intersection(a, b)
    if common is None:
        return [a] if volume(a) else []
    left = []
    for at, ((start, stop), (low, high)) in enumerate(zip(a, common, strict=True)):
        for edge in ((start, low), (high, stop)):
            if edge[0] < edge[1]:
                left.append((*common[:at], edge, *a[at + 1 :]))
    return left


@lru_cache(maxsize=4096)
def refine(boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """Disjoint boxes with the same elements, each of them within or outside of every box given."""
    found: list[Box] = []
    for box in boxes:
        rest, split = ([box] if volume(box) else []), []
        for part in found:
            common = intersection(part, box)
            if common is None:
                split.append(part)
                continue
            split += [common, *subtract(part, common)]
            rest = [piece for left in rest for piece in subtract(left, common)]
        found = split + rest
    return tuple(found)


@lru_cache(maxsize=65536)
def overlaps(boxes: tuple[Box, ...], box: Box) -> tuple[tuple[int, Box], ...]:
    """The number of every box that has elements of `box`, and which ones."""
    met = ((at, intersection(other, box)) for at, other in enumerate(boxes))
    return tuple((at, common) for at, common in met if common is not None)


def shift(box: Box, origin: Box, to: Box) -> Box:
    """A part of `origin` as the part at the same place within `to`, which has the same sizes."""
    triples = zip(box, origin, to, strict=True)
    return tuple((s - o + t, e - o + t) for (s, e), (o, _), (t, _) in triples)


def cut(box: Box, limit: int) -> Iterator[Box]:
    """The box in consecutive pieces of at most `limit` elements, cut along early dimensions."""
    total = volume(box)
    if total <= limit:
        yield box
        return
    at = next(number for number, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[at]
    step = max(1, limit // (total // (stop - start)))
    for low in range(start, stop, step):
        yield from cut((*box[:at], (low, min(stop, low + step)), *box[at + 1 :]), limit)
