"""Random cyclic traces, and the fewest bytes that any choice of what stays can move."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import hypothesis.strategies as st

from rlflow.scheduler.memory.intervals import Gap, Ring, Trace

Draw = Callable[[st.SearchStrategy], object]
Use = tuple[int, tuple[int, ...]]
"""The ring an action runs on besides ring 0, or -1, and the parts that it needs."""


def trace_of(
    sizes: list[int],
    needs: list[tuple[int, ...]],
    budget: int,
    transients: list[int] | None = None,
    free: frozenset[tuple[int, int]] = frozenset(),
) -> Trace:
    """One memory; action i needs `needs[i]`, and part p may be thrown away in the gaps `free`.

    `free` are (part, place of the use that ends the gap).
    """
    transients = transients or [0] * len(needs)
    rooms = tuple(
        budget - taken - sum(sizes[p] for p in need)
        for need, taken in zip(needs, transients, strict=True)
    )
    length = len(needs)
    used = sorted({p for need in needs for p in need})
    spare = budget - sum(sizes[p] for p in used)
    gaps = []
    for part in used:
        places = [i for i, need in enumerate(needs) if part in need]
        for since, until in zip(places, [*places[1:], places[0]], strict=True):
            between = (until - since - 1) % length
            rows = tuple((0, (since + 1 + n) % length) for n in range(between))
            cost = 0 if (part, until) in free else 2 * sizes[part]
            gaps.append(
                Gap(size=sizes[part], cost=cost, since=since, until=until, rings=(0,), rows=rows)
            )
    ring = Ring(rooms=rooms, places=tuple(range(length)), spare=spare)
    return Trace(length=length, rings=(ring,), gaps=tuple(gaps))


def fewest(trace: Trace) -> int:
    """The least that any choice moves, by trying them all."""
    contested = sorted({n for held in trace.tight.values() for n in held})
    always = frozenset(range(len(trace.gaps))) - frozenset(contested)
    return min(
        trace.moved(stay)
        for kept in product((False, True), repeat=len(contested))
        if trace.fits(stay := always | {n for n, k in zip(contested, kept, strict=True) if k})
    )


def random_trace(random: Random, *, equal: bool, length: int, parts: int) -> Trace:
    """A trace whose every action fits alone."""
    sizes = [10] * parts if equal else [random.choice((3, 4, 7, 10, 16, 21)) for _ in range(parts)]
    needs = [
        tuple(sorted(random.sample(range(parts), random.randint(0, min(2, parts)))))
        for _ in range(length)
    ]
    transients = [random.choice((0, 0, 5, 11, 20)) for _ in needs]
    alone = max(
        sum(sizes[p] for p in need) + taken for need, taken in zip(needs, transients, strict=True)
    )
    budget = max(alone, round(random.uniform(0.3, 1.0) * (sum(sizes) + max(transients))))
    free = frozenset((p, i) for i, need in enumerate(needs) for p in need if random.random() < 0.2)
    return trace_of(sizes, needs, budget, transients, free)


@st.composite
def traces(draw: Draw, *, equal: bool = False, length: int = 8, parts: int = 5) -> Trace:
    """A small trace, drawn by its seed."""
    random = Random(draw(st.integers(0, 2**32)))
    return random_trace(random, equal=equal, length=length, parts=parts)
