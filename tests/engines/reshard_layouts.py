"""Layouts of small models as tables, not made by the code under test; and moves by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

SIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


def chunks(start, stop, n):
    """n ranges as torch.chunk cuts them: equal but the last ones, which may be empty."""
    step = -(-(stop - start) // n)
    edges = [min(stop, start + number * step) for number in range(n + 1)]
    return list(itertools.pairwise(edges))


def cut_along(box, dim, n):
    """A box cut in n along a dimension; n times itself where it has no such dimension."""
    if dim >= len(box):
        return [box] * n
    return [(*box[:dim], part, *box[dim + 1 :]) for part in chunks(*box[dim], n)]


def boxes(shape, cuts):
    """The box of every rank of a mesh: `cuts` are (dimension or None, ranks), outermost first."""
    found = [tuple((0, length) for length in shape)]
    for dim, n in cuts:
        found = [
            part for box in found for part in ([box] * n if dim is None else cut_along(box, dim, n))
        ]
    return found


LAYOUTS = {
    "whole": lambda n: [(None, n)],
    "fsdp": lambda n: [(0, n)],
    "tp columns": lambda n: [(0, n)],
    "tp rows": lambda n: [(1, n)],
    "hsdp": lambda n: [(None, 2), (0, n // 2)],
    "fsdp x tp": lambda n: [(0, 2), (1, n // 2)],
    "fsdp in tp": lambda n: [(0, n // 2), (0, 2)],
    "dp x tp": lambda n: [(None, 2), (1, n // 2)],
}


def tables(params, layout, ranks, dtype="float32"):
    """rank -> table, for a layout by name over the ranks in their order."""
    per_rank = {rank: {} for rank in ranks}
    for name, shape in params.items():
        found = boxes(shape, LAYOUTS[layout](len(ranks)))
        for rank, box in zip(ranks, found, strict=True):
            per_rank[rank][name] = (shape, dtype, box)
    return per_rank


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 7)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
)
models = st.lists(shapes, min_size=1, max_size=4).map(
    lambda found: {f"p{number}": shape for number, shape in enumerate(found)}
)


@st.composite
def meshes(draw):
    """A layout's name and the ranks that it lies over, of 8."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    one = layout in ("whole", "fsdp", "tp columns", "tp rows")
    n = draw(st.sampled_from([1, 2, 3, 4, 5] if one else [2, 4, 6]))
    return layout, draw(st.permutations(range(8)))[:n]


@st.composite
def scattered(draw, params):
    """Tables of a source of no regular form: any boxes on some ranks, a whole copy on one."""
    found = {rank: {} for rank in range(4)}
    for name, shape in params.items():
        for rank in range(4):
            box = []
            for length in shape:
                start = draw(st.integers(0, length))
                box.append((start, draw(st.integers(start, length))))
            found[rank][name] = (shape, "float32", tuple(box))
        found[3][name] = (shape, "float32", tuple((0, length) for length in shape))
    return found


def at(box):
    return tuple(slice(start, stop) for start, stop in box)


def within(box, outer):
    """Where a box lies in an array that holds `outer`."""
    return tuple(
        slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True)
    )


def whole_arrays(source):
    """Distinct values for every element of every parameter of a source."""
    found, start = {}, 1
    for table in source.values():
        for name, (shape, dtype, _) in table.items():
            if name not in found:
                count = math.prod(shape)
                values = np.arange(start, start + count) + (0.25 if dtype != "uint8" else 0)
                found[name] = values.astype(dtype).reshape(shape)
                start += count
    return found


def carried_out(source, targets, moves):
    """Target arrays by (target, rank, name) after the moves, and how often each element arrived.

    Elements that nobody wrote are -1. A move may only read what its sender holds.
    """
    values = whole_arrays(source)
    arrived = {}
    made = {
        (index, rank, name): np.full([stop - start for start, stop in box], -1).astype(dtype)
        for index, target in enumerate(targets)
        for rank, table in target.items()
        for name, (_, dtype, box) in table.items()
    }
    for move in moves:
        held = source[move.sender][move.name][2]
        shard = values[move.name][at(held)]
        inside = [
            low <= start <= stop <= high
            for (start, stop), (low, high) in zip(move.box, held, strict=True)
        ]
        assert all(inside)
        sent = shard[within(move.box, held)].astype(move.dtype)
        assert sent.nbytes == move.bytes
        if move.sender != move.receiver:
            key = (move.receiver, move.name)
            count = arrived.setdefault(key, np.zeros(values[move.name].shape, int))
            count[at(move.box)] += 1
        for place in move.places:
            into = made[place.index, move.receiver, move.name]
            outer = targets[place.index][move.receiver][move.name][2]
            into[within(move.box, outer)] = sent
    return made, arrived


def lacking(source, targets, rank):
    """By parameter: which elements a rank wants for plain targets and does not hold."""
    found = {}
    for target in targets:
        for name, (shape, _, box) in target.get(rank, {}).items():
            found.setdefault(name, np.zeros(shape, bool))[at(box)] = True
    for name, mask in found.items():
        if name in source.get(rank, {}):
            mask[at(source[rank][name][2])] = False
    return found
