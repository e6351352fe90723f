"""Whole weights one after the other in buckets: of one dtype each, bounded, in one of two slots.

Every rank makes the same layout from the same table. This file imports no torch; it knows no
engine and no transport.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.engines.reshard.boxes import Shape
from rlflow.engines.reshard.slices import ITEMSIZE

SLOTS = 2

# Name, dtype, shape, offset in bytes.
Row = tuple[str, str, Shape, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Weights that lie one after the other in `bytes` of memory, number `slot` of two.

    `source` is the rank from which all others get it.
    """

    rows: tuple[Row, ...]
    bytes: int
    slot: int
    source: int


def weight_buckets(
    table: Mapping[str, tuple[Shape, str]], limit: int, sources: Sequence[int]
) -> tuple[WeightBucket, ...]:
    """A table of shapes and dtypes in buckets of at most `limit` bytes, in its order.

    A weight that is larger has a bucket alone, always in slot 0; the others take turns, so that
    slot 1 never has more than `limit` bytes. So do the sources. Weights without elements are left
    out.
    """
    parts: list[list[Row]] = []
    end, kind = limit, ""
    for name, (shape, dtype) in table.items():
        size = math.prod(shape) * ITEMSIZE[dtype]
        if not size:
            continue
        if end + size > limit or dtype != kind:
            parts.append([])
            end, kind = 0, dtype
        parts[-1].append((name, dtype, tuple(shape), end))
        end += size
    made: list[WeightBucket] = []
    for number, rows in enumerate(parts):
        _, dtype, shape, last = rows[-1]
        size = last + math.prod(shape) * ITEMSIZE[dtype]
        before = made[-1].slot if made else SLOTS - 1
        slot = 0 if size > limit else (before + 1) % SLOTS
        source = sources[number % len(sources)]
        made.append(WeightBucket(rows=tuple(rows), bytes=size, slot=slot, source=source))
    return tuple(made)


def slot_bytes(buckets: Sequence[WeightBucket]) -> tuple[int, ...]:
    """Bytes of memory of each slot."""
    return tuple(max((b.bytes for b in buckets if b.slot == s), default=0) for s in range(SLOTS))
