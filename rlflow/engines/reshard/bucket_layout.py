"""Whole weights one after the other in buckets: of one kind each, bounded, in one of two slots.

A weight in float8 lies beside the scales of its blocks, and is gathered before it is quantised.
Every rank makes the same layout from the same table. This file imports no torch; it knows no
engine and no transport.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.engines.reshard.boxes import Shape
from rlflow.engines.reshard.buckets import aligned
from rlflow.engines.reshard.slices import ITEMSIZE

SLOTS = 2
# The dtype of quantised weights, and that of the same before.
QUANTISED, PLAIN = "float8_e4m3fn", "bfloat16"

# Name, dtype, shape, offset in bytes.
Row = tuple[str, str, Shape, int]


def scale_name(name: str) -> str:
    """The name of the scales of a quantised weight, as checkpoints in blocks have it."""
    return f"{name}_scale_inv"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Weights that lie one after the other in `bytes` of memory, number `slot` of two.

    `source` is the rank from which all others get it. Those of one `round`, by the number of the
    first of them, are gathered at the same time, each by another rank.
    """

    rows: tuple[Row, ...]
    bytes: int
    slot: int
    source: int
    round: int

    @property
    def quantised(self) -> bool:
        """Whether its weights are in float8, each with its scales behind it."""
        return self.rows[0][1] == QUANTISED

    @property
    def gathered(self) -> WeightBucket:
        """The same before it is quantised, as its source gathers it; itself where it is not."""
        if not self.quantised:
            return self
        made: list[Row] = []
        end = 0
        for name, dtype, shape, _ in self.rows:
            if dtype == QUANTISED:
                made.append((name, PLAIN, shape, end))
                end += math.prod(shape) * ITEMSIZE[PLAIN]
        return replace(self, rows=tuple(made), bytes=end)


@dataclass(frozen=True, slots=True)
class _Unit:
    """What stays together: a weight, or a quantised one and its scales; `bound` bytes to count."""

    rows: tuple[Row, ...]
    bytes: int
    bound: int


def weight_buckets(
    table: Mapping[str, tuple[Shape, str]],
    limit: int,
    sources: Sequence[int],
    *,
    at_once: bool = False,
) -> tuple[WeightBucket, ...]:
    """A table of shapes and dtypes in buckets of at most `limit` bytes, in its order.

    A weight that is larger has a bucket alone, always in slot 0; the others take turns, so that
    slot 1 never has more than `limit` bytes. So do the sources, of which each gathers one of a
    round where they gather `at_once`; a larger weight is a round by itself. Weights without
    elements are left out. Of quantised weights the limit holds for what is gathered.
    """
    parts: list[list[_Unit]] = []
    end, kind = limit, ""
    for unit in _units(table):
        _, dtype, _, _ = unit.rows[0]
        if end + unit.bound > limit or dtype != kind:
            parts.append([])
            end, kind = 0, dtype
        parts[-1].append(unit)
        end += unit.bound
    made: list[WeightBucket] = []
    begin, apart = 0, False
    for number, units in enumerate(parts):
        rows: list[Row] = []
        size = 0
        for unit in units:
            rows += [(*row[:3], size + row[3]) for row in unit.rows]
            size += unit.bytes
        before = made[-1].slot if made else SLOTS - 1
        alone = sum(unit.bound for unit in units) > limit
        slot = 0 if alone else (before + 1) % SLOTS
        turn = number % len(sources)
        if alone or apart or not at_once or turn == 0:
            begin = number
        apart = alone
        made.append(
            WeightBucket(rows=tuple(rows), bytes=size, slot=slot, source=sources[turn], round=begin)
        )
    return tuple(made)


def _units(table: Mapping[str, tuple[Shape, str]]) -> Iterator[_Unit]:
    """The weights of a table that have elements, each quantised one with its scales."""
    scales = {scale_name(name) for name, (_, dtype) in table.items() if dtype == QUANTISED}
    for name, (shape, dtype) in table.items():
        size = math.prod(shape) * ITEMSIZE[dtype]
        if not size or name in scales:
            continue
        row = (name, dtype, tuple(shape), 0)
        if dtype != QUANTISED:
            yield _Unit((row,), size, size)
            continue
        its, kind = table[scale_name(name)]
        begin = aligned(size)
        whole = begin + aligned(math.prod(its) * ITEMSIZE[kind])
        rows = (row, (scale_name(name), kind, tuple(its), begin))
        yield _Unit(rows, whole, max(whole, math.prod(shape) * ITEMSIZE[PLAIN]))


def slot_bytes(buckets: Sequence[WeightBucket]) -> tuple[int, ...]:
    """Bytes of memory of each slot."""
    return tuple(max((b.bytes for b in buckets if b.slot == s), default=0) for s in range(SLOTS))


def turn_bytes(buckets: Sequence[WeightBucket], rank: int) -> int:
    """Bytes that a rank keeps a bucket in until its turn, of a round of several."""
    rounds = Counter(bucket.round for bucket in buckets)
    own = (b for b in buckets if b.source == rank and rounds[b.round] > 1)
    return max((bucket.bytes for bucket in own), default=0)


def scratch_bytes(buckets: Sequence[WeightBucket]) -> int:
    """Bytes that a source gathers weights into before it quantises them."""
    return max((b.gathered.bytes for b in buckets if b.quantised), default=0)
