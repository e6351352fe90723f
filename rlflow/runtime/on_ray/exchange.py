"""Rows on their way from the ranks that made them to those that read them.

A transfer is computed from row numbers: who sends which of its rows to whom. Rows travel as
numpy arrays in Ray's object store, put there by the sender and read in place by the
receivers; the controller passes references on. This file knows no op and no placement.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import (
    concat_rows,
    flat,
    is_ragged,
    make_batch,
    offsets,
    select_field,
    select_rows,
)
from rlflow.runtime.rows import Cut, cuts
from rlflow.scheduler.plan import Spread

Rows = NDArray[np.int64]
Entry = tuple[str, tuple[int, ...], NDArray[np.uint8], Rows | None]
Packed = dict[str, Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one source part that one receiver takes.

    `sender` is None where the receiver holds them itself; else `index` is their place among
    what the sender sends. `source` are places in the source part, None for all of it in order;
    `target` are their places in the receiver's part, None likewise.
    """

    sender: int | None
    index: int
    source: Rows | None
    target: Rows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A transfer: for every holder what it sends, for every receiver what it takes."""

    sends: Mapping[int, tuple[Rows | None, ...]]
    takes: Mapping[int, tuple[Piece, ...]]


def exchange(
    source: Spread, held: Sequence[Rows], target: Spread, wanted: Sequence[Rows]
) -> Exchange:
    """Who sends what, so that every receiver gets each of its rows once.

    `held[i]` and `wanted[j]` are the row numbers of source part i and target part j.
    Receivers that hold a source part themselves get nothing of it sent.
    """
    sends: dict[int, list[Rows | None]] = {device: [] for device in source.devices}
    takes: dict[int, list[Piece]] = {device: [] for device in target.devices}
    for cut in [*cuts(list(held), list(wanted)), *_empty(wanted)]:
        holders = source.parts[cut.source]
        receivers = target.parts[cut.target]
        places = _unless_all(cut.taken, len(held[cut.source]))
        into = _unless_all(cut.placed, len(wanted[cut.target]))
        remote = [device for device in receivers if device not in holders]
        sender = holders[cut.target % len(holders)]
        if remote:
            sends[sender].append(places)
        for device in receivers:
            takes[device].append(
                Piece(
                    sender=sender if device in remote else None,
                    index=len(sends[sender]) - 1,
                    source=places,
                    target=into,
                )
            )
    return Exchange(
        sends={device: tuple(rows) for device, rows in sends.items()},
        takes={device: tuple(pieces) for device, pieces in takes.items()},
    )


def _empty(wanted: Sequence[Rows]) -> list[Cut]:
    """A part without rows still needs its fields: none of the first source part's rows."""
    none = np.empty(0, dtype=np.int64)
    return [
        Cut(source=0, target=part, taken=none, placed=none)
        for part, rows in enumerate(wanted)
        if not len(rows)
    ]


def _unless_all(places: Rows, count: int) -> Rows | None:
    """The places, or None where they are all of them in order."""
    whole = len(places) == count and bool((places == np.arange(count)).all())
    return None if whole else places


def packed(fields: Mapping[str, Tensor], rows: Rows | None) -> Packed:
    """Fields of some rows as arrays that another process can read in place.

    An entry is dtype, shape, the values as bytes, and where rows begin if they are ragged.
    """
    if rows is not None:
        index = torch.from_numpy(rows)
        fields = {name: select_field(field, index) for name, field in fields.items()}
    return {name: _packed_field(field) for name, field in fields.items()}


def _packed_field(field: Tensor) -> Entry:
    values = flat(field) if is_ragged(field) else field
    bounds = offsets(field).cpu().numpy() if is_ragged(field) else None
    host = values.detach().cpu().contiguous()
    raw = host.view(-1).view(torch.uint8).numpy()
    return str(host.dtype).removeprefix("torch."), tuple(host.shape), raw, bounds


def unpacked(entries: Packed) -> dict[str, Tensor]:
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
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(bounds))


def joined(
    pieces: Sequence[tuple[dict[str, Tensor], Rows | None]], count: int
) -> dict[str, Tensor]:
    """One part's fields of pieces and their places in it; a whole piece is taken as it is."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    batches, places = [], []
    for fields, target in pieces:
        rows = np.arange(count) if target is None else target
        batches.append(make_batch(fields, len(rows)))
        places.append(rows)
    back = np.empty(count, dtype=np.int64)
    back[np.concatenate(places)] = np.arange(count)
    return dict(select_rows(concat_rows(batches), torch.from_numpy(back)).items())
