"""The record of one process: rows are taken where they are made, and written by a thread beside.

What waits is bounded: where the thread is behind, an iteration's rows are dropped and counted,
for a run never waits for its record. Nor does it end with it: whatever goes wrong is noted.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch

from rlflow.batch import concat_rows, flat, is_ragged, make_batch, offsets, select_field
from rlflow.runtime.record.edges.choice import RecordedNode, Recording
from rlflow.runtime.record.edges.secrets import is_secret
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from rlflow.scheduler.plan.plan import HOST, Action, Plan

if TYPE_CHECKING:
    from torch import Tensor

# Free bytes of a disk that the record leaves to checkpoints.
LEFT_FREE = 2**30
# Rows that wait to be written, in bytes. One entry waits whatever its size.
WAITING = 512 * 2**20


class RowsMade(Protocol):
    """Rows that an action has left in this process, as the shard store keeps them."""

    @property
    def fields(self) -> dict[str, Tensor]:
        """Fields by name."""

    @property
    def total(self) -> int:
        """Rows of the whole batch."""

    @property
    def rows(self) -> Tensor | None:
        """The numbers of these rows in it, int64; None for all of them."""

    def without(self, names: Collection[str]) -> Self:
        """The same rows without some fields."""


R = TypeVar("R", bound=RowsMade)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What became of a process's record so far.

    Files `written`, entries `dropped` since the thread was behind, and `failed` ones with the
    last `problem` that was met.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some rows of a node's output; `rows` are their numbers, int64 `[rows]`."""

    fields: Mapping[str, Tensor]
    rows: Tensor

    @property
    def size(self) -> int:
        """Bytes of all fields."""
        return sum(_values(field).nbytes for field in self.fields.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What is to become one file."""

    chosen: RecordedNode
    iteration: int
    total: int
    pieces: Sequence[_Piece]

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)


class Recorder:
    """Takes the rows of recorded nodes in this process, and writes them in a thread of its own.

    `own` is the device of this process among several, None where there is one process. Chunks of
    a node become one file, once the last of them is there.
    """

    def __init__(self, recording: Recording | None, plan: Plan, own: int | None = None) -> None:
        self._recording = recording or Recording(chosen=(), run=Path(), cap=0)
        self._plan = plan
        self._own = own
        self._pieces: dict[tuple[str, int], dict[str, _Piece]] = {}
        self._waiting: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._bytes = 0
        self._notes = Notes()
        self._thread: threading.Thread | None = None

    def adds(self, node: str, iteration: int) -> frozenset[str]:
        """Fields of a node that are made to be recorded only."""
        chosen = self._recording.by_node.get(node)
        return chosen.extra if chosen is not None and chosen.due(iteration) else frozenset()

    def take(self, action: Action, iteration: int, made: R) -> R:
        """Record rows that an action has made here, where they are due; returns what is to stay.

        That is all but the fields which were made to be recorded only.
        """
        chosen = self._recording.by_node.get(str(action.node))
        if chosen is None or not chosen.due(iteration):
            return made
        try:
            if self._writes(action):
                self._take(chosen, action, iteration, made)
        except Exception as error:
            self._failed(error)
        return made.without(chosen.extra)

    def notes(self) -> Notes:
        """What became of the record so far."""
        with self._lock:
            return self._notes

    def finish(self, seconds: float) -> Notes:
        """Write what waits, for so many seconds at most, and end the thread."""
        for node, iteration in list(self._pieces):
            self._put(self._recording.by_node[node], iteration, total=None)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join(seconds)
        return self.notes()

    def _writes(self, action: Action) -> bool:
        """Whether this process writes its rows: of several that hold the same ones, the first."""
        if self._own is None:
            return True
        spread = action.makes or action.takes
        if spread is not None:
            return any(holders[0] == self._own for holders in spread.parts)
        if action.instance is not None:
            return self._own in action.devices[:: self._plan.instance(action.instance).tp]
        return self._own == action.devices[0]

    def _take(self, chosen: RecordedNode, action: Action, iteration: int, made: RowsMade) -> None:
        piece = _piece(made, chosen.limit)
        found = self._pieces.setdefault((chosen.node, iteration), {})
        found[action.id] = piece
        if action.chunk is None or len(found) == action.chunk.count:
            self._put(chosen, iteration, total=made.total)

    def _put(self, chosen: RecordedNode, iteration: int, total: int | None) -> None:
        """Hand the pieces of an iteration to the thread, unless too much waits."""
        pieces = list(self._pieces.pop((chosen.node, iteration)).values())
        known = sum(len(piece.rows) for piece in pieces) if total is None else total
        entry = _Entry(chosen=chosen, iteration=iteration, total=known, pieces=pieces)
        with self._lock:
            if self._bytes and self._bytes + entry.size > WAITING:
                self._notes = replace(self._notes, dropped=self._notes.dropped + 1)
                return
            self._bytes += entry.size
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
            self._thread.start()
        self._waiting.put(entry)

    def _write_all(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                self._write(entry)
            except Exception as error:
                self._failed(error)
            else:
                with self._lock:
                    self._notes = replace(self._notes, written=self._notes.written + 1)
            with self._lock:
                self._bytes -= entry.size

    def _write(self, entry: _Entry) -> None:
        chosen, piece = entry.chosen, _joined(entry.pieces)
        if not len(piece.rows):
            return
        rows = piece.rows.numpy()
        table = edge_table(
            chosen.about(entry.iteration, entry.total),
            piece.fields,
            rows,
            groups=None if chosen.size is None else rows // chosen.size,
            texts=chosen.texts,
        )
        rank = None if self._own in (None, HOST) else self._own
        _require_space(self._recording.run)
        write_edge(self._recording.run, table, rank=rank)

    def _failed(self, error: Exception) -> None:
        text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        with self._lock:
            self._notes = replace(self._notes, failed=self._notes.failed + 1, problem=text)


def _require_space(run: Path) -> None:
    """Raise OSError where the disk is nearly full."""
    disk = os.statvfs(run)
    free = disk.f_bavail * disk.f_frsize
    if free < LEFT_FREE:
        text = f"{free / 1e9:.1f} GB are free, and the last GB is left to checkpoints"
        raise OSError(errno.ENOSPC, text, str(run))


def _values(field: Tensor) -> Tensor:
    return flat(field) if is_ragged(field) else field


def _piece(made: RowsMade, limit: int | None) -> _Piece:
    """The rows below a limit, copied; all of them as they are where there is none."""
    fields = {name: field for name, field in made.fields.items() if not is_secret(name)}
    rows = torch.arange(made.total) if made.rows is None else made.rows
    if limit is None:
        return _Piece(fields=fields, rows=rows)
    if made.rows is None:
        count = min(limit, made.total)
        first = {name: _first(field, count) for name, field in fields.items()}
        return _Piece(fields=first, rows=rows[:count])
    places = torch.nonzero(rows < limit).flatten()
    chosen = {name: select_field(field, places) for name, field in fields.items()}
    return _Piece(fields=chosen, rows=rows[places])


def _first(field: Tensor, count: int) -> Tensor:
    """The first rows of a field, copied, so that the others can be freed."""
    if not is_ragged(field):
        return field[:count].clone()
    bounds = offsets(field)[: count + 1]
    values = flat(field)[: int(bounds[-1])].clone()
    return torch.nested.nested_tensor_from_jagged(values, bounds.clone())


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    """Pieces of one output below each other."""
    if len(pieces) == 1:
        return pieces[0]
    joined = concat_rows([make_batch(piece.fields, len(piece.rows)) for piece in pieces])
    return _Piece(fields=dict(joined.items()), rows=torch.cat([piece.rows for piece in pieces]))
