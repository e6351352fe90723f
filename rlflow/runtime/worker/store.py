"""The shard store: the rows that actions leave in this process, kept until the last reader.

Keys are (action, iteration): a node's run, or the transfer that brought a copy of its rows.
This file knows neither models nor time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.batch import Batch, concat_rows, make_batch, select_field, select_rows
from rlflow.runtime.execute.rows import chunk_rows
from rlflow.scheduler.plan.plan import Chunk

Key = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Fields of the rows that this process holds.

    `rows` int64 `[rows held]` numbers them within the batch's `total` rows; None for all of them.
    """

    fields: dict[str, Tensor]
    total: int
    rows: Tensor | None = None

    @property
    def held(self) -> int:
        """How many rows are here."""
        return self.total if self.rows is None else len(self.rows)

    def without(self, names: Collection[str]) -> Stored:
        """The same rows without some fields."""
        fields = {name: field for name, field in self.fields.items() if name not in names}
        return replace(self, fields=fields)

    def of(self, chunk: Chunk | None) -> Stored:
        """The rows that a chunk works on; this itself where it holds no others.

        What a rollout has ended first was put here as a piece of its own.
        """
        if chunk is not None and chunk.as_ended:
            return self
        first, last = chunk_rows(self.total, chunk)
        numbers = torch.arange(self.total) if self.rows is None else self.rows
        inside = (numbers >= first) & (numbers < last)
        if bool(inside.all()):
            return self
        places = torch.nonzero(inside).flatten()
        fields = {name: select_field(field, places) for name, field in self.fields.items()}
        return Stored(fields=fields, total=self.total, rows=numbers[places])


def joined_fields(pieces: Sequence[Stored], names: Collection[str]) -> Stored:
    """Some fields of the pieces of one batch, in the order of their rows."""
    chosen = [{name: piece.fields[name] for name in names} for piece in pieces]
    if len(pieces) == 1:
        return Stored(fields=chosen[0], total=pieces[0].total, rows=pieces[0].rows)
    joined = concat_rows(
        [make_batch(fields, piece.held) for fields, piece in zip(chosen, pieces, strict=True)]
    )
    total = pieces[0].total
    rows = torch.cat([p.rows for p in pieces if p.rows is not None])
    if bool((rows[1:] < rows[:-1]).any()):
        order = torch.argsort(rows, stable=True)
        rows, joined = rows[order], select_rows(joined, order)
    whole = len(rows) == total and bool((rows == torch.arange(total)).all())
    return Stored(fields=dict(joined.items()), total=total, rows=None if whole else rows)


class ShardStore:
    """Rows by action and iteration, freed when everybody that reads them has."""

    def __init__(self) -> None:
        self._held: dict[Key, Stored] = {}
        self._left: dict[Key, int] = {}
        self.surplus: dict[str, Batch] = {}
        """What a loop has gathered beyond its goal, by its name, for the next iteration."""
        self.memory: dict[str, Batch] = {}
        """What nodes have kept for later iterations, by their names; checkpoints hold it."""
        self._lock = threading.Lock()

    def put(self, action: str, iteration: int, stored: Stored, readers: int) -> None:
        """Keep what an action made until `readers` have released it; nothing for no reader."""
        if readers:
            with self._lock:
                self._held[action, iteration] = stored
                self._left[action, iteration] = readers

    def get(self, action: str, iteration: int) -> Stored:
        """What an action made in an iteration; KeyError once its last reader has run."""
        return self._held[action, iteration]

    def has(self, action: str, iteration: int) -> bool:
        """Whether rows are here that an action made in an iteration."""
        return (action, iteration) in self._held

    def release(self, action: str, iteration: int) -> None:
        """Note that one reader has run; the last one frees the rows."""
        key = (action, iteration)
        with self._lock:
            self._left[key] -= 1
            if self._left[key] == 0:
                del self._held[key], self._left[key]

    def leave(self, loop: str, rows: Batch | None) -> None:
        """Keep rows for the next iteration of a loop, in the place of those kept before."""
        self.surplus.pop(loop, None)
        if rows is not None:
            self.surplus[loop] = rows

    def __len__(self) -> int:
        return len(self._held)
