"""Which rows a batch draws where rows are in buckets that have a share of it each.

All of it follows from a seed, the number of the draw and how many rows of each bucket were drawn
before. This file knows neither what a bucket is measured by nor what scores a row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from rlflow.data.sources import ROW_ID, DataSource, Row, row_at

UNIT = 2.0**-64


def shared_out(weights: Sequence[float], floor: float) -> list[float]:
    """The share of the draws that each bucket has, in proportion to its weight.

    `floor` of all draws go to the buckets alike, and all of them where every weight is 0.
    """
    total, alike = sum(weights), 1 / len(weights)
    if not total:
        return [alike] * len(weights)
    return [floor * alike + (1 - floor) * (weight / total) for weight in weights]


def drawn_buckets(shares: Sequence[float], size: int, *, seed: int, draw: int) -> list[int]:
    """From which bucket each row of a batch comes, by place.

    Systematic sampling (Madow 1949, "On the theory of systematic sampling, II"): one random
    offset, then steps of 1 / size, so that of a batch each bucket gets its share rounded down or
    up, and on average exactly that. The places are in random order.
    """
    ends = list(accumulate(shares))
    last = bisect_left(ends, ends[-1])
    offset = random_bits(seed, draw, "offset") * UNIT
    points = ((offset + step) / size * ends[-1] for step in range(size))
    found = [min(bisect_right(ends, point), last) for point in points]
    order = sorted(range(size), key=lambda place: random_bits(seed, draw, "place", place))
    return [found[place] for place in order]


def row_of(bucket: str, rows: Sequence[int], position: int, seed: int) -> int:
    """The `row_id` that a bucket of these rows gives after `position` others.

    Each row comes once in an epoch of the bucket, every epoch in an order of its own.
    """
    return rows[row_at(position, len(rows), random_bits(seed, "bucket", bucket))]


def draw_rows(
    data: DataSource, column: str, names: Sequence[str], taken: Mapping[str, int], seed: int
) -> tuple[list[Row], dict[str, int]]:
    """The next row of each bucket named, with its `row_id`, and how many are taken then.

    `taken` is how many rows of a bucket were drawn before, 0 for those that it leaves out; what
    comes back has the buckets that are named. Raises `DataError` where rows cannot be read.
    """
    buckets, rows = data.buckets(column), data.rows()
    counts = {name: taken.get(name, 0) for name in names}
    found = []
    for name in names:
        row_id = row_of(name, buckets[name], counts[name], seed)
        counts[name] += 1
        found.append({**rows[row_id], ROW_ID: row_id})
    return found, counts


def random_bits(*parts: int | str) -> int:
    """64 random bits that follow from numbers and names alone."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
