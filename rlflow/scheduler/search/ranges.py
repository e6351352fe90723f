"""Ranges of devices: where they may be divided, and how those of roles lie to each other.

Knows counts, hosts and kinds; neither models nor layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from rlflow.scheduler.devices.cluster import Cluster

EIGHTHS = 8
FEW_DEVICES = 8
Range = tuple[int, int]


def cut_points(cluster: Cluster) -> tuple[int, ...]:
    """Where devices may be divided: everywhere among a few, else at eighths and small powers of 2.

    Where kinds of devices meet there is a cut as well.
    """
    count = cluster.count
    if count <= FEW_DEVICES:
        return tuple(range(1, count))
    points = {count * part // EIGHTHS for part in range(1, EIGHTHS)}
    small = [2**power for power in range(count.bit_length()) if count // 32 <= 2**power < count]
    few = [size for size in small if size <= count // EIGHTHS]
    points |= {*few, *(count - size for size in few)}
    met = itertools.accumulate(number for _, number in cluster.kinds)
    return tuple(sorted(point for point in {*points, *met} if 0 < point < count))


def near_cuts(point: int, cluster: Cluster) -> list[int]:
    """The cuts next to a point on both sides, and half way to them in halves of a host."""
    points = cut_points(cluster)
    below = [p for p in points if p < point][-1:]
    above = [p for p in points if p > point][:1]
    grain = max(1, -(-cluster.count // cluster.hosts) // 2) if cluster.count > FEW_DEVICES else 1
    half = [(point + other) // 2 // grain * grain for other in (*below, *above)]
    found = {p for p in (*below, *above, *half) if 0 < p < cluster.count}
    return sorted(found - {point})


def divisions(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Ways to divide the devices: not at all, in two anywhere, in three at coarse points."""
    points, count = cut_points(cluster), cluster.count
    coarse = points
    if count > FEW_DEVICES:
        coarse = tuple(p for p in points if p * EIGHTHS % count == 0) or points
    yield (0, count)
    for point in points:
        yield 0, point, count
    for first, second in itertools.combinations(coarse, 2):
        yield 0, first, second, count


def unions(division: tuple[int, ...], cluster: Cluster) -> list[Range]:
    """The ranges of neighbouring pieces, each of devices of one kind."""
    return [where for where in itertools.combinations(division, 2) if alike(where, cluster)]


def alike(where: Range, cluster: Cluster) -> bool:
    """Whether the devices of a range are of one kind."""
    met = itertools.accumulate(number for _, number in cluster.kinds)
    return not any(where[0] < boundary < where[1] for boundary in met)


def pattern(devices: Sequence[Collection[int]]) -> str:
    """How the devices of roles lie to each other, whatever their number.

    For each pair: `=` the same, `<` and `>` one within the other, `|` apart, `x` some in common.
    """
    sets = [frozenset(held) for held in devices]
    return "".join(_relation(one, other) for one, other in itertools.combinations(sets, 2))


def _relation(one: frozenset[int], other: frozenset[int]) -> str:
    if one == other:
        return "="
    if one < other:
        return "<"
    if one > other:
        return ">"
    return "|" if one.isdisjoint(other) else "x"
