"""Rows that wait to be written: taken from a batch cheaply, and joined to what becomes a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlflow.batch import flat, is_ragged, offsets, select_field
from rlflow.runtime.record.edges.choice import RecordedNode
from rlflow.runtime.record.edges.names import About
from rlflow.runtime.record.edges.secrets import is_secret

if TYPE_CHECKING:
    from torch import Tensor

# A field of so many bytes is held as it is, where only some of its rows are recorded.
HELD_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class HeldField:
    """A field of some rows: its values, flat where it is ragged, and then their int64 bounds."""

    values: Tensor
    bounds: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What two of them share that can be joined."""
        return self.values.dtype, self.values.shape[1:], self.bounds is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenRows:
    """Some rows of a node's output; `rows` are their numbers, int64 `[rows]`."""

    fields: Mapping[str, HeldField]
    rows: Tensor

    @property
    def size(self) -> int:
        """Bytes that all fields hold."""
        return sum(field.values.untyped_storage().nbytes() for field in self.fields.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The rows of a node in one iteration, `size` bytes, of `total` that it made."""

    chosen: RecordedNode
    iteration: int
    total: int
    pieces: Sequence[TakenRows]
    size: int

    @property
    def count(self) -> int:
        """Rows of all pieces."""
        return sum(len(piece.rows) for piece in self.pieces)


def piece_of(
    fields: Mapping[str, Tensor], rows: Tensor | None, total: int, limit: int | None
) -> TakenRows:
    """The rows below a limit, copied; all of them as they are where there is none.

    `rows` are their numbers among `total`, None for all. Fields named like keys are left out.
    """
    fields = {name: field for name, field in fields.items() if not is_secret(name)}
    numbers = torch.arange(total) if rows is None else rows
    if limit is None:
        return TakenRows(fields={n: _held(field) for n, field in fields.items()}, rows=numbers)
    if rows is None:
        return TakenRows(fields=_first(fields, min(limit, total)), rows=numbers[:limit])
    places = torch.nonzero(rows < limit).flatten()
    chosen = {name: _held(select_field(field, places)) for name, field in fields.items()}
    return TakenRows(fields=chosen, rows=rows[places])


def joined(entries: Sequence[Entry]) -> tuple[dict[str, Tensor], Tensor]:
    """The fields of entries of one kind below each other, and their rows' numbers."""
    pieces = [piece for entry in entries for piece in entry.pieces]
    bounds: dict[tuple[int, ...], Tensor] = {}
    fields = {name: _below([p.fields[name] for p in pieces], bounds) for name in pieces[0].fields}
    return fields, torch.cat([piece.rows for piece in pieces])


def about_file(entries: Sequence[Entry]) -> About:
    """What the file of some entries says of itself."""
    first = entries[0]
    parts = tuple((entry.iteration, entry.count, entry.total) for entry in entries)
    return first.chosen.about(first.iteration, first.total, parts if len(parts) > 1 else ())


def files(entries: Sequence[Entry], most: int) -> Iterator[Sequence[Entry]]:
    """Entries as those of one file each: of one node and kind, without a gap between iterations.

    A file that has `most` bytes takes no more.
    """
    ordered = sorted(entries, key=lambda entry: (entry.chosen.node, entry.iteration))
    found: list[Entry] = []
    size = 0
    for entry in ordered:
        if found and not (size < most and _goes_on(found[-1], entry)):
            yield found
            found, size = [], 0
        found.append(entry)
        size += entry.size
    if found:
        yield found


def _goes_on(last: Entry, entry: Entry) -> bool:
    """Whether an entry is of the iteration that is recorded next after another, and of its kind."""
    if entry.iteration != last.iteration + entry.chosen.rule.every:
        return False
    fields, others = entry.pieces[0].fields, last.pieces[0].fields
    same = entry.chosen.node == last.chosen.node and fields.keys() == others.keys()
    return same and all(field.kind == others[name].kind for name, field in fields.items())


def _held(field: Tensor) -> HeldField:
    return HeldField(*_parts(field))


def _first(fields: Mapping[str, Tensor], count: int) -> dict[str, HeldField]:
    """The first rows of fields; of a large one copied, so that the others can be freed.

    Fields of a token each have the same bounds, which are cut once.
    """
    found: dict[str, HeldField] = {}
    cuts: dict[int, tuple[Tensor, int]] = {}
    for name, field in fields.items():
        values, bounds = _parts(field)
        if bounds is None:
            found[name] = HeldField(_apart(values, count), None)
            continue
        cut = cuts.get(id(bounds))
        if cut is None:
            cut = cuts[id(bounds)] = bounds[: count + 1], int(bounds[count])
        found[name] = HeldField(_apart(values, cut[1]), cut[0])
    return found


def _apart(values: Tensor, count: int) -> Tensor:
    """The first values; a small tensor is held as it is, for a copy takes longer than it."""
    return values[:count] if values.nbytes <= HELD_BYTES else values[:count].clone()


def _parts(field: Tensor) -> tuple[Tensor, Tensor | None]:
    """The values of a field, and the bounds of its rows where it is ragged.

    Rows that lie in the same values, as those of one prompt's pictures, are copied. A question
    to a nested tensor takes a tenth of a millisecond; what it holds is there at once.
    """
    held = getattr(field, "_values", None)
    if isinstance(held, torch.Tensor) and getattr(field, "_lengths", None) is None:
        return held.detach(), offsets(field)
    return (flat(field), offsets(field)) if is_ragged(field) else (field, None)


def _below(fields: Sequence[HeldField], known: dict[tuple[int, ...], Tensor]) -> Tensor:
    """The field of all rows, on the CPU; `known` are the joined bounds of fields before it."""
    values = [field.values for field in fields]
    whole = (torch.cat(values) if len(values) > 1 else values[0]).detach().cpu()
    bounds = [field.bounds for field in fields if field.bounds is not None]
    if not bounds:
        return whole
    key = tuple(map(id, bounds))
    if key not in known:
        sizes = [np.diff(each.cpu().numpy()) for each in bounds]
        joined_bounds = np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum()
        known[key] = torch.from_numpy(joined_bounds)
    return torch.nested.nested_tensor_from_jagged(whole, known[key])
