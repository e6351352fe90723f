"""The record of one process: rows are taken where they are made, and written by a thread beside.

What waits is bounded: where the thread is behind, an iteration's rows are dropped and counted,
for a run never waits for its record. Nor does it end with it: whatever goes wrong is noted.
Of iterations that are shorter than a file is waited for, several become one file.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from rlflow.errors import error_text
from rlflow.runtime.record.edges.choice import RecordedNode, Recording
from rlflow.runtime.record.edges.pieces import Entry, TakenRows, about_file, files, joined, piece_of
from rlflow.runtime.record.edges.writing import edge_table, write_edge
from rlflow.scheduler.plan.plan import HOST, Action, Plan

if TYPE_CHECKING:
    from torch import Tensor

# Free bytes of a disk that the record leaves to checkpoints.
LEFT_FREE = 2**30
# Rows that wait to be written, in bytes. One entry waits whatever its size.
WAITING = 512 * 2**20
# How long rows wait for those of the next iterations, the first ones only so long and then twice
# as long every time; and how many bytes at most do.
WAIT_SECONDS = 10.0
FIRST_SECONDS = 1.0
FILE_BYTES = 32 * 2**20


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
    """What became of a process's record so far, in iterations of a node.

    So many are `written`, `dropped` since the thread was behind, and `failed` with the last
    `problem` that was met.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0
    problem: str = ""


class Recorder:
    """Takes the rows of recorded nodes in this process, and writes them in a thread of its own.

    `own` is the device of this process among several, None where there is one process. Chunks of
    a node become one entry of a file, once the last of them is there.
    """

    def __init__(self, recording: Recording | None, plan: Plan, own: int | None = None) -> None:
        self._recording = recording or Recording(chosen=(), run=Path(), cap=0)
        self._plan = plan
        self._own = own
        self._most = waiting_bytes(plan)
        self._pieces: dict[tuple[str, int], dict[str, TakenRows]] = {}
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._bytes = 0
        self._due = 0.0
        self._wait = FIRST_SECONDS
        self._ending = False
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
            self._failed(error, 1)
        return made.without(chosen.extra) if chosen.extra else made

    def notes(self) -> Notes:
        """What became of the record so far."""
        with self._changed:
            return self._notes

    def flush(self) -> None:
        """Have the thread write what waits now; returns at once."""
        with self._changed:
            self._due = 0.0
            self._changed.notify()

    def finish(self, seconds: float) -> Notes:
        """Write what waits, for so many seconds at most, and end the thread."""
        for node, iteration in list(self._pieces):
            self._put(self._recording.by_node[node], iteration, total=None)
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._ending = True
                self._changed.notify()
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
            groups = self._plan.instance(action.instance).row_groups
            return any(holders[0] == self._own for holders in groups)
        return self._own == action.devices[0]

    def _take(self, chosen: RecordedNode, action: Action, iteration: int, made: RowsMade) -> None:
        piece = piece_of(made.fields, made.rows, made.total, chosen.limit)
        found = self._pieces.setdefault((chosen.node, iteration), {})
        found[action.id] = piece
        if action.chunk is None or len(found) == action.chunk.count:
            self._put(chosen, iteration, total=made.total)

    def _put(self, chosen: RecordedNode, iteration: int, total: int | None) -> None:
        """Hand the pieces of an iteration to the thread, unless too much waits."""
        pieces = list(self._pieces.pop((chosen.node, iteration)).values())
        known = sum(len(piece.rows) for piece in pieces) if total is None else total
        size = sum(piece.size for piece in pieces)
        entry = Entry(chosen=chosen, iteration=iteration, total=known, pieces=pieces, size=size)
        if not entry.count:
            return
        with self._changed:
            if self._bytes and self._bytes + size > self._most:
                self._notes = replace(self._notes, dropped=self._notes.dropped + 1)
                return
            if not self._waiting:
                self._due = time.monotonic() + min(self._wait, WAIT_SECONDS)
                self._wait *= 2
            self._waiting.append(entry)
            self._bytes += size
            started = self._thread is not None
            if not started:
                self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
                self._ending = False
            # The thread sleeps until what came first is due: it is woken for much alone.
            elif len(self._waiting) == 1 or self._bytes >= FILE_BYTES:
                self._changed.notify()
        if not started and self._thread is not None:
            self._thread.start()

    def _write_all(self) -> None:
        while entries := self._next():
            for found in files(entries, FILE_BYTES):
                try:
                    self._write(found)
                except Exception as error:
                    self._failed(error, len(found))
                else:
                    with self._changed:
                        written = self._notes.written + len(found)
                        self._notes = replace(self._notes, written=written)
                with self._changed:
                    self._bytes -= sum(entry.size for entry in found)

    def _next(self) -> list[Entry]:
        """What waits, once it is due, much, or the last; nothing at the end."""
        with self._changed:
            while not self._ending and self._bytes < FILE_BYTES:
                left = self._due - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            found, self._waiting = self._waiting, []
            return found

    def _write(self, entries: Sequence[Entry]) -> None:
        """Write entries of one node as one file."""
        chosen = entries[0].chosen
        fields, numbers = joined(entries)
        rows = numbers.numpy()
        groups = None if chosen.size is None else rows // chosen.size
        table = edge_table(about_file(entries), fields, rows, groups=groups, texts=chosen.texts)
        rank = None if self._own in (None, HOST) else self._own
        _require_space(self._recording.run)
        write_edge(self._recording.run, table, rank=rank)

    def _failed(self, error: Exception, count: int) -> None:
        text = str(error) if isinstance(error, OSError) else error_text(error)
        with self._changed:
            failed = self._notes.failed + count
            self._notes = replace(self._notes, failed=failed, problem=text)


def waiting_bytes(plan: Plan) -> int:
    """How many bytes may wait in a process: what the plan leaves of a host, for each of them.

    No more than 512 MiB, which is what there is of a host of unknown size.
    """
    if HOST not in plan.budgets:
        return WAITING
    left = plan.budget(HOST) - plan.peaks.get(HOST, 0)
    devices = Counter(plan.host_of(device) for device in plan.budgets if device != HOST)
    local = plan.backend == "local"
    processes = 1 if local else max(devices.values(), default=0) + 1
    return min(WAITING, max(left, 0) // processes)


def _require_space(run: Path) -> None:
    """Raise OSError where the disk is nearly full."""
    disk = os.statvfs(run)
    free = disk.f_bavail * disk.f_frsize
    if free < LEFT_FREE:
        text = f"{free / 1e9:.1f} GB are free, and the last GB is left to checkpoints"
        raise OSError(errno.ENOSPC, text, str(run))
