"""The worker process of one device, or of the host: a Ray actor around a `Worker`.

Everything it returns is metadata; rows go through the object store. An error of an action
is returned as a value, with the text of its traceback, so that the controller decides what
becomes of the run. Rows are sent and received, and parts go to the host and come back, beside
the action that runs. torch is imported when the plan arrives, after the number of threads is
set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray

from rlflow.contract.progress import Progress, following
from rlflow.errors import Finding, RunError
from rlflow.runtime.ray.cluster.process_lifetime import die_with_parent
from rlflow.runtime.ray.exchange import RowPiece
from rlflow.runtime.ray.made import Failed, Made, collect, failed, packed_made, timed
from rlflow.runtime.ray.orders import Order
from rlflow.runtime.ray.orders import Packed as PackedOrder
from rlflow.runtime.ray.pools import Report, own_report
from rlflow.runtime.ray.ranks import RankStanding, Start
from rlflow.runtime.record.durable import FileRecord, fault, register_faults
from rlflow.runtime.record.lines.clock import clock
from rlflow.runtime.record.shards.places import SavedPiece, StoredFile, ToWrite
from rlflow.scheduler.plan.plan import HOST, Action, Plan

if TYPE_CHECKING:
    from rlflow.runtime.ray.packing import Packed
    from rlflow.runtime.record.edges.recorder import Notes
    from rlflow.runtime.worker.saving import Saver
    from rlflow.runtime.worker.worker import Worker

Rows = NDArray[np.int64]
FAULT_RANK = "RLFLOW_FAULT_RANK"
# What `progress` knows the loading of the models by.
STARTING = ("", 0)

register_faults("rank:run", "rank:reshard", "rank:sleep", "rank:wake", "rank:send", "rank:receive")
register_faults("rank:snapshot", "rank:saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a rank has taken for a checkpoint: bytes of its files, optimizers' counters by model."""

    size: int
    counters: Mapping[str, Mapping[str, int]]


class Rank:
    """One process of the plan; the controller calls its methods one at a time.

    `send` and `receive` run in the concurrency group `rows`, `move` in `copies` and `save` in
    `saving`, beside what the device does; `progress` in a group of its own, beside them all.
    """

    def __init__(self) -> None:
        die_with_parent()
        collect()
        self._worker: Worker | None = None
        self._saver: Saver | None = None
        self._own = HOST
        self._progress: dict[tuple[str, int], Progress] = {}

    def report(self) -> Report:
        """Where this process is."""
        return own_report()

    def hold_port(self, address: str) -> int:
        """A port of this node, kept for the ranks to meet at."""
        from rlflow.runtime.ray.rendezvous import hold_port

        return hold_port(address)

    def start(self, plan: bytes, start: Start) -> Made | Failed:
        """Join the other ranks and load the models of this device."""
        return timed(lambda: self._follow(STARTING, lambda: self._start(plan, start)))

    def run(self, packed: PackedOrder, keep: Rows | None = None) -> list[Any] | Failed:
        """Carry out this rank's part of an `Order`, packed; a `Made`, packed."""
        order = Order.unpacked(packed)
        action = self._actions[order.action]
        return packed_made(self._timed(action, order.iteration, keep))

    def drop_surplus(self) -> None:
        """Forget what loops have left over."""
        self._ready().drop_surplus()

    def skip(self, packed: PackedOrder) -> None:
        """Let go of what an action instance would have read that does not run."""
        order = Order.unpacked(packed)
        self._ready().skip(self._actions[order.action], order.iteration)

    @ray.method(concurrency_group="progress")
    def progress(self, action: str, iteration: int) -> tuple[int, str]:
        """How often an action instance has advanced here, and what it has done in words."""
        found = self._progress.get((action, iteration))
        return (0, "") if found is None else (found.moves, str(found))

    @ray.method(concurrency_group="progress")
    def standing(self) -> RankStanding:
        """How many collectives this rank has begun, and how often what it does has advanced."""
        moves = sum(each.moves for each in list(self._progress.values()))
        if self._worker is None or len(self._devices) < 2:
            return RankStanding(counted={}, moves=moves)
        from rlflow.runtime.ray.process_group import group_calls

        return RankStanding(counted=group_calls(self._devices), moves=moves)

    @ray.method(concurrency_group="copies")
    def move(self, packed: PackedOrder) -> list[Any] | Failed:
        """Carry out this rank's part of a sleep or wake; the order says what becomes of it."""
        order = Order.unpacked(packed)
        action = replace(self._actions[order.action], mode=order.mode)
        return packed_made(self._timed(action, order.iteration, None))

    @ray.method(concurrency_group="rows")
    def send(
        self, transfer: str, iteration: int, wanted: Sequence[Rows | None], keeps: bool
    ) -> list[Any] | Failed:
        """Put rows of a part into the object store, one entry for each of `wanted`.

        Rows are places in the part, None for all of it. Unless this rank `keeps` the part to
        receive of itself, the transfer has read it.
        """
        try:
            from rlflow.runtime.ray.packing import packed_rows

            self._fault("rank:send")
            worker = self._ready()
            fields = self._fields(transfer, iteration) if wanted else {}
            sent = [ray.put(packed_rows(fields, rows)) for rows in wanted]
            if not keeps:
                worker.release(self._actions[transfer], iteration)
        except Exception as error:
            return failed(error)
        return sent

    @ray.method(concurrency_group="rows")
    def receive(
        self,
        transfer: str,
        iteration: int,
        rows: Rows | None,
        total: int,
        pieces: Sequence[RowPiece],
        senders: Sequence[int],
        *sent: list[Any] | Failed,
    ) -> list[Any] | Failed:
        """Take a part's rows from those who sent them, and from this rank's own store.

        `rows` are their numbers in the batch of `total` rows, None for all of them.
        """
        by_sender: dict[int, list[Any]] = {}
        for sender, found in zip(senders, sent, strict=True):
            if isinstance(found, Failed):
                return found
            by_sender[sender] = found
        return packed_made(
            timed(lambda: self._receive(transfer, iteration, rows, total, pieces, by_sender))
        )

    def pieces(self) -> dict[str, dict[str, SavedPiece]]:
        """The places of what is trained here, by component and tensor."""
        return self._saving().held()

    def snapshot(self, orders: Mapping[str, ToWrite]) -> Taken | Failed:
        """Take a snapshot of what this rank is to write of a checkpoint."""
        try:
            self._fault("rank:snapshot")
            size = self._saving().take(orders)
            return Taken(size=size, counters=self._saving().counters())
        except Exception as error:
            return failed(error)

    @ray.method(concurrency_group="saving")
    def save(self, directory: str) -> dict[str, FileRecord] | Failed:
        """Write the snapshot's files, beside what runs; each one's size and digest."""
        try:
            found = self._saving().write(Path(directory))
            self._fault("rank:saved")
            return found
        except Exception as error:
            return failed(error)

    def restore(
        self,
        instance: str,
        files: Mapping[str, Sequence[StoredFile]],
        meta: Mapping[str, int],
        version: int,
    ) -> Made | Failed:
        """Read this rank's shards of a checkpoint's components."""
        from rlflow.runtime.worker.saving import restore_components

        loaded = self._ready().loaded[instance]
        return timed(lambda: restore_components(loaded, files, meta, version))

    def states(self) -> dict[str, dict[str, float]]:
        """What the nodes that this process runs keep from call to call, and its cuts."""
        return self._ready().states.to_save()

    def remember(self, states: dict[str, dict[str, float]]) -> None:
        """Take what nodes had kept."""
        self._ready().states.load(states)

    def recall(self, files: Mapping[str, Sequence[StoredFile]]) -> Made | Failed:
        """Take the rows that nodes had kept, of those that run here."""
        from rlflow.runtime.worker.memories import restored

        worker = self._ready()
        return timed(lambda: worker.store.memory.update(restored(worker.graph, files)))

    def held(self) -> int:
        """How many entries the shard store has."""
        return len(self._ready().store)

    @ray.method(concurrency_group="saving")
    def record_notes(self, seconds: float | None) -> Notes:
        """What became of the record here; with seconds it is finished first."""
        recorder = self._ready().recorder
        return recorder.notes() if seconds is None else recorder.finish(seconds)

    def close(self) -> None:
        """End what runs beside this process."""
        if self._worker is not None:
            self._worker.close()

    def _fault(self, point: str) -> None:
        """Pass a failpoint, on the rank that RLFLOW_FAULT_RANK names if it is set."""
        chosen = os.environ.get(FAULT_RANK)
        if chosen is None or int(chosen) == self._own:
            fault(point)

    def _ready(self) -> Worker:
        if self._worker is None:
            raise RunError(Finding(code="E756", what="a rank is used before its plan arrived"))
        return self._worker

    def _saving(self) -> Saver:
        from rlflow.runtime.worker.saving import Saver

        if self._saver is None:
            self._saver = Saver(self._ready())
        return self._saver

    def _start(self, plan: bytes, start: Start) -> Made:
        began = clock()
        os.environ["OMP_NUM_THREADS"] = str(start.threads)
        import torch

        from rlflow.runtime.ray.shipping import unshipped
        from rlflow.runtime.record.devices.meter import DeviceMeter
        from rlflow.runtime.record.edges.recorder import Recorder
        from rlflow.runtime.worker.allocator import keep_freed_memory
        from rlflow.runtime.worker.worker import Worker

        torch.set_num_threads(start.threads)
        self._threads = start.threads
        self._own, self._devices = start.own, start.devices
        self._profiled = start.profiled
        self._meter = DeviceMeter("cpu" if start.own == HOST else start.device)
        keep_freed_memory()
        found: Plan = unshipped(plan)
        self._actions = {action.id: action for action in found.actions}
        world = _world(found, start)
        self._worker = Worker(
            found, seed=start.seed, near=start.near, world=world, check_sync=start.check_sync
        )
        self._worker.recorder = Recorder(start.recording, found, start.own)
        return Made(start=began, end=clock())

    def _timed(self, entry: Action, iteration: int, keep: Rows | None) -> Made | Failed:
        """Carry out an action instance, of which `progress` tells how far it is."""
        key = (entry.id, iteration)
        return timed(lambda: self._follow(key, lambda: self._run(entry, iteration, keep)))

    def _follow(self, key: tuple[str, int], call: Callable[[], Made]) -> Made:
        progress = self._progress[key] = Progress()
        try:
            with following(progress):
                return call()
        finally:
            del self._progress[key]

    def _run(self, entry: Action, iteration: int, keep: Rows | None) -> Made:
        import torch

        from rlflow.runtime.record.devices.kernels import with_kernels

        torch.set_num_threads(self._threads)
        self._fault(f"rank:{entry.kind}")
        began = clock()
        kept = None if keep is None else torch.from_numpy(keep)
        perform = partial(self._ready().perform, entry, iteration, kept)
        traced = partial(with_kernels, self._profiled, perform, entry.id, iteration, self._own)
        result, figures = self._meter.around(traced, beside=entry.lane == "copy")
        figures |= result.work
        return Made(
            start=began,
            end=clock(),
            metrics=result.metrics,
            rows=result.rows,
            total=result.total,
            tokens=None if result.tokens is None else result.tokens.numpy(),
            groups=None if result.groups is None else result.groups.numpy(),
            numbers=None if result.numbers is None else result.numbers.numpy(),
            moved=result.moved,
            figures=figures,
        )

    def _fields(self, transfer: str, iteration: int) -> dict[str, Any]:
        action = self._actions[transfer]
        return self._ready().held(action, str(action.node), iteration, action.fields).fields

    def _receive(
        self,
        transfer: str,
        iteration: int,
        rows: Rows | None,
        total: int,
        pieces: Sequence[RowPiece],
        sent: Mapping[int, list[Any]],
    ) -> Made:
        import torch

        from rlflow.runtime.ray.packing import joined_pieces, packed_rows, unpacked_rows
        from rlflow.runtime.worker.store import Stored

        self._fault("rank:receive")
        began = clock()
        worker = self._ready()
        here = any(piece.sender is None for piece in pieces)
        own = self._fields(transfer, iteration) if here else {}
        references = [sent[p.sender][p.index] for p in pieces if p.sender is not None]
        arrived = iter(ray.get(references))
        moved = 0
        found = []
        for piece in pieces:
            if piece.sender is None:
                entries = packed_rows(own, piece.source)
            else:
                entries = next(arrived)
                moved += _size(entries)
            found.append((unpacked_rows(entries), piece.target))
        count = total if rows is None else len(rows)
        stored = Stored(
            fields=joined_pieces(found, count),
            total=total,
            rows=None if rows is None else torch.from_numpy(rows.copy()),
        )
        worker.store.put(transfer, iteration, stored, worker.flow.readers(transfer, iteration))
        if here:
            worker.release(self._actions[transfer], iteration)
        return Made(start=began, end=clock(), moved=moved)


def _world(plan: Plan, start: Start) -> Any:
    """The groups of this rank; the host has none."""
    from rlflow.runtime.ray.process_group import Host, join_ranks

    if start.own == HOST:
        return Host(plan)
    return join_ranks(plan, start)


def _size(entries: Packed) -> int:
    return sum(
        raw.nbytes + (0 if bounds is None else bounds.nbytes)
        for _, _, raw, bounds in entries.values()
    )
