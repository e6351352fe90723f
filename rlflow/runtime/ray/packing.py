"""Rows as numpy arrays: what Ray's object store holds, put by one rank and read in place by others.

Nothing is pickled and nothing padded. This file knows neither who sends nor what it is for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import (
    concat_rows,
    flat,
    is_ragged,
    is_shared,
    make_batch,
    offsets,
    ragged,
    select_field,
    shared,
    shared_parts,
)

Rows = NDArray[np.int64]
Entry = tuple[str, tuple[int, ...], NDArray[np.uint8], Rows | None]
Packed = dict[str, Entry]


def packed_rows(fields: Mapping[str, Tensor], rows: Rows | None) -> Packed:
    """Fields of some rows as arrays that another process can read in place.

    An entry is dtype, shape, the values as bytes, and where rows begin if they are ragged; where
    rows share values, `[2, rows]`, where each begins and how long it is. Rows
    that follow each other are taken as they lie, without a copy.
    """
    if rows is not None:
        chosen = runs(rows)
        fields = {name: picked(field, chosen) for name, field in fields.items()}
    return {name: _packed_field(field) for name, field in fields.items()}


def runs(rows: Rows) -> list[tuple[int, int]]:
    """Row numbers as runs (first, last + 1) of rows that follow each other."""
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts = rows[np.concatenate([[0], breaks])]
    lasts = rows[np.concatenate([breaks - 1, [len(rows) - 1]])]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def picked(field: Tensor, chosen: Sequence[tuple[int, int]]) -> Tensor:
    """The rows of some runs, in their order; a view where there is one run."""
    if not is_ragged(field):
        return _together([field[a:b] for a, b in chosen], field)
    if is_shared(field):
        rows = [torch.arange(a, b) for a, b in chosen]
        return select_field(field, torch.cat([torch.arange(0), *rows]))
    values, bounds = flat(field), offsets(field)
    at = bounds.tolist()
    kept = _together([values[at[a] : at[b]] for a, b in chosen], values)
    size = _together([bounds[a + 1 : b + 1] - bounds[a:b] for a, b in chosen], bounds)
    return ragged(kept, size)


def _together(parts: list[Tensor], like: Tensor) -> Tensor:
    """Parts one after the other; the part itself where there is one."""
    if not parts:
        return like[:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _packed_field(field: Tensor) -> Entry:
    bounds = offsets(field).cpu().numpy() if is_ragged(field) else None
    if is_shared(field):
        values, starts, sizes = shared_parts(field)
        bounds = torch.stack([starts, sizes]).cpu().numpy()
    else:
        values = flat(field) if is_ragged(field) else field
    host = values.detach().cpu().contiguous()
    raw = host.view(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, dtype=np.uint8)
    return str(host.dtype).removeprefix("torch."), tuple(host.shape), raw, bounds


def unpacked_rows(entries: Packed) -> dict[str, Tensor]:
    """The fields again, views of the arrays, which are read-only where Ray shares them."""
    return {name: _unpacked_field(*entry) for name, entry in entries.items()}


def _unpacked_field(
    dtype: str, shape: tuple[int, ...], raw: NDArray[np.uint8], bounds: Rows | None
) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        kind = getattr(torch, dtype)
        values = (
            torch.from_numpy(raw).view(kind).view(shape)
            if raw.size
            else torch.empty(shape, dtype=kind)
        )
        if bounds is None:
            return values
        if bounds.ndim > 1:
            return shared(values, *torch.from_numpy(bounds).unbind())
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(bounds))


def joined_pieces(
    pieces: Sequence[tuple[dict[str, Tensor], Rows | None]], count: int
) -> dict[str, Tensor]:
    """One part's fields of pieces and their places in it; a whole piece is taken as it is."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    placed = [np.arange(count) if target is None else target for _, target in pieces]
    back = np.empty(count, dtype=np.int64)
    back[np.concatenate(placed)] = np.arange(count)
    chosen = runs(back)
    together = concat_rows(
        [make_batch(fields, len(rows)) for (fields, _), rows in zip(pieces, placed, strict=True)]
    )
    return {name: picked(field, chosen) for name, field in together.items()}
