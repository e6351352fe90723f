"""The worker process of one device, or of the host: a Ray actor around a `Worker`.

Everything it returns is metadata; rows go through the object store. An error of an action
is returned as a value, with the text of its traceback, so that the controller decides what
becomes of the run. Rows are sent and received, and parts go to the host and come back, beside
the action that runs. torch is imported when the plan arrives, after the number of threads is
set.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray

from rlflow.errors import Finding, RlflowError, RunError
from rlflow.runtime.durable import FileRecord, fault, register_faults
from rlflow.runtime.on_ray.exchange import Piece
from rlflow.runtime.on_ray.fate import die_with_parent
from rlflow.runtime.on_ray.pools import Report, report
from rlflow.scheduler.plan import HOST, Action, Plan

if TYPE_CHECKING:
    from rlflow.ops.body import Stat
    from rlflow.runtime.on_ray.packing import Packed
    from rlflow.runtime.worker import Worker

Rows = NDArray[np.int64]
FAULT_RANK = "RLFLOW_FAULT_RANK"

register_faults("rank:run", "rank:reshard", "rank:sleep", "rank:wake", "rank:send", "rank:receive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a rank needs to know besides the plan; `devices` are the plan's, by rank.

    `address` is that of the rank's own node.
    """

    own: int
    devices: tuple[int, ...]
    master: str
    port: int
    device: str
    threads: int
    seed: int
    near: Path | None
    check_sync: bool
    timeout: float
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an action instance did on this rank, on its own clock (seconds since the epoch)."""

    start: float
    end: float
    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
    rows: int = 0
    total: int = 0
    tokens: Rows | None = None
    numbers: Rows | None = None
    moved: int | None = None

    def packed(self) -> list[Any]:
        """Lists and numbers, which Ray sends in half the time that an object takes."""
        metrics = {
            name: value
            if isinstance(value, float)
            else [value.kind, value.total, value.count, value.spread]
            for name, value in self.metrics.items()
        }
        made = [self.rows, self.total, self.tokens, self.numbers, self.moved]
        return [self.start, self.end, metrics, *made]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> Made:
        """The same again."""
        start, end, metrics, rows, total, tokens, numbers, moved = packed
        return cls(
            start=start,
            end=end,
            metrics={name: _stat(value) for name, value in metrics.items()},
            rows=rows,
            total=total,
            tokens=tokens,
            numbers=numbers,
            moved=moved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error of an action; `error` is one of rlflow's, `trace` the text of its traceback."""

    error: tuple[type[RlflowError], tuple[Finding, ...], str]
    trace: str

    def raised(self) -> RlflowError:
        """The error itself."""
        kind, findings, summary = self.error
        return kind(*findings, summary=summary)


class Rank:
    """One process of the plan; the controller calls its methods one at a time.

    `send` and `receive` run in the concurrency group `rows`, and `move` in `copies`, beside what
    the device does.
    """

    def __init__(self) -> None:
        die_with_parent()
        self._worker: Worker | None = None
        self._own = HOST

    def report(self) -> Report:
        """Where this process is."""
        return report()

    def hold_port(self, address: str) -> int:
        """A port of this node, kept for the ranks to meet at."""
        from rlflow.runtime.on_ray.rendezvous import hold_port

        return hold_port(address)

    def start(self, plan: bytes, start: Start) -> Made | Failed:
        """Join the other ranks and load the models of this device."""
        return _timed(lambda: self._start(plan, start))

    def run(self, order: str, keep: Rows | None = None) -> list[Any] | Failed:
        """Carry out this rank's part of an action instance; a `Made`, packed.

        `order` is the iteration and the action's id in one string: Ray sends each argument
        by itself, and takes its time for each.
        """
        iteration, _, action = order.partition(" ")
        return _packed(_timed(lambda: self._run(self._actions[action], int(iteration), keep)))

    def drop_surplus(self) -> None:
        """Forget what loops have left over."""
        self._ready().drop_surplus()

    def skip(self, order: str) -> None:
        """Let go of what an action instance would have read that does not run."""
        iteration, _, action = order.partition(" ")
        self._ready().skip(self._actions[action], int(iteration))

    @ray.method(concurrency_group="copies")
    def move(self, order: str) -> list[Any] | Failed:
        """Carry out this rank's part of a sleep or wake; `order` also has what becomes of it."""
        iteration, mode, action = order.split(" ", 2)
        entry = replace(self._actions[action], mode="discard" if mode == "discard" else "offload")
        return _packed(_timed(lambda: self._run(entry, int(iteration), None)))

    @ray.method(concurrency_group="rows")
    def send(
        self, transfer: str, iteration: int, wanted: Sequence[Rows | None], keeps: bool
    ) -> list[Any] | Failed:
        """Put rows of a part into the object store, one entry for each of `wanted`.

        Rows are places in the part, None for all of it. Unless this rank `keeps` the part to
        receive of itself, the transfer has read it.
        """
        try:
            from rlflow.runtime.on_ray.packing import packed

            self._fault("rank:send")
            worker = self._ready()
            fields = self._fields(transfer, iteration) if wanted else {}
            sent = [ray.put(packed(fields, rows)) for rows in wanted]
            if not keeps:
                worker.release(self._actions[transfer], iteration)
        except Exception as error:
            return _failed(error)
        return sent

    @ray.method(concurrency_group="rows")
    def receive(
        self,
        transfer: str,
        iteration: int,
        rows: Rows | None,
        total: int,
        pieces: Sequence[Piece],
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
        return _packed(
            _timed(lambda: self._receive(transfer, iteration, rows, total, pieces, by_sender))
        )

    def save(self, instance: str, component: str, path: str | None) -> FileRecord | Failed | None:
        """Write a component of a checkpoint, with the other ranks; the record on the writer."""
        from rlflow.runtime.saving import save_component

        try:
            loaded = self._ready().loaded[instance]
            world = self._ready().world
            return save_component(loaded, component, None if path is None else Path(path), world)
        except Exception as error:
            return _failed(error)

    def restore(
        self, instance: str, files: Mapping[str, str], meta: Mapping[str, int], version: int
    ) -> Made | Failed:
        """Read this rank's shards of a checkpoint's components."""
        from rlflow.runtime.saving import restore_components

        paths = {name: Path(path) for name, path in files.items()}
        loaded = self._ready().loaded[instance]
        return _timed(lambda: restore_components(loaded, paths, meta, version))

    def sizes(self, instance: str) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of each component as a file has them, and the optimizer's counters."""
        from rlflow.runtime.saving import component_sizes

        loaded = self._ready().loaded[instance]
        return component_sizes(loaded), loaded.train.optimizer_meta()

    def states(self) -> dict[str, dict[str, float]]:
        """What the nodes that this process runs keep from call to call."""
        return self._ready().states.used

    def remember(self, states: dict[str, dict[str, float]]) -> None:
        """Take what nodes had kept."""
        self._ready().states.load(states)

    def held(self) -> int:
        """How many entries the shard store has."""
        return len(self._ready().store)

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

    def _start(self, plan: bytes, start: Start) -> Made:
        began = time.time()
        os.environ["OMP_NUM_THREADS"] = str(start.threads)
        import torch

        from rlflow.runtime.allocator import keep_freed_memory
        from rlflow.runtime.on_ray.shipping import unshipped
        from rlflow.runtime.worker import Worker

        torch.set_num_threads(start.threads)
        self._threads = start.threads
        self._own = start.own
        keep_freed_memory()
        found: Plan = unshipped(plan)
        self._actions = {action.id: action for action in found.actions}
        world = _world(found, start)
        self._worker = Worker(
            found, seed=start.seed, near=start.near, world=world, check_sync=start.check_sync
        )
        return Made(start=began, end=time.time())

    def _run(self, entry: Action, iteration: int, keep: Rows | None) -> Made:
        import torch

        torch.set_num_threads(self._threads)
        self._fault(f"rank:{entry.kind}")
        began = time.time()
        kept = None if keep is None else torch.from_numpy(keep)
        result = self._ready().perform(entry, iteration, kept)
        return Made(
            start=began,
            end=time.time(),
            metrics=result.metrics,
            rows=result.rows,
            total=result.total,
            tokens=None if result.tokens is None else result.tokens.numpy(),
            numbers=None if result.numbers is None else result.numbers.numpy(),
            moved=result.moved,
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
        pieces: Sequence[Piece],
        sent: Mapping[int, list[Any]],
    ) -> Made:
        import torch

        from rlflow.runtime.on_ray.packing import joined, packed, unpacked
        from rlflow.runtime.store import Stored

        self._fault("rank:receive")
        began = time.time()
        worker = self._ready()
        here = any(piece.sender is None for piece in pieces)
        own = self._fields(transfer, iteration) if here else {}
        references = [sent[p.sender][p.index] for p in pieces if p.sender is not None]
        arrived = iter(ray.get(references))
        moved = 0
        found = []
        for piece in pieces:
            if piece.sender is None:
                entries = packed(own, piece.source)
            else:
                entries = next(arrived)
                moved += _size(entries)
            found.append((unpacked(entries), piece.target))
        count = total if rows is None else len(rows)
        stored = Stored(
            fields=joined(found, count),
            total=total,
            rows=None if rows is None else torch.from_numpy(rows.copy()),
        )
        worker.store.put(transfer, iteration, stored, worker.flow.readers(transfer, iteration))
        if here:
            worker.release(self._actions[transfer], iteration)
        return Made(start=began, end=time.time(), moved=moved)


def _world(plan: Plan, start: Start) -> Any:
    """The groups of this rank; the host has none."""
    from rlflow.runtime.on_ray.here import Host, join_ranks

    if start.own == HOST:
        return Host(plan)
    return join_ranks(plan, start)


def _size(entries: Packed) -> int:
    return sum(
        raw.nbytes + (0 if bounds is None else bounds.nbytes)
        for _, _, raw, bounds in entries.values()
    )


def _packed(found: Made | Failed) -> list[Any] | Failed:
    return found.packed() if isinstance(found, Made) else found


def _stat(value: float | list[Any]) -> float | Stat:
    """A number of the metrics as it was before it was packed."""
    if isinstance(value, float):
        return value
    from rlflow.ops.body import Stat

    kind, total, count, spread = value
    return Stat(kind=kind, total=total, count=count, spread=spread)


def _timed(action: Callable[[], Made | None]) -> Made | Failed:
    """What an action made, or the error it raised as a value."""
    began = time.time()
    try:
        return action() or Made(start=began, end=time.time())
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Failed:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, RlflowError):
        return Failed(error=(type(error), error.findings, error.summary), trace=trace)
    what = f"{type(error).__name__}: {error}"
    return Failed(error=(RunError, (Finding(code="E751", what=what),), ""), trace=trace)
