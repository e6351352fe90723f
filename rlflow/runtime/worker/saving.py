"""What a checkpoint holds of this process: snapshots of it, the files they become, and back.

Every process writes what it is told to of what it holds, and reads of a checkpoint the parts
that its shards need, in whatever layout it was saved. This file knows neither when a checkpoint
is due nor what completes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.durable import FileRecord, fault, register_faults
from rlflow.runtime.record.resuming import FRESH
from rlflow.runtime.record.shards.places import SUFFIX, SavedPiece, ShardOf, StoredFile, ToWrite
from rlflow.runtime.record.shards.reading import open_component
from rlflow.runtime.record.shards.snapshot import HostBuffers, Keep, Snapshot, take_snapshot
from rlflow.runtime.worker.memories import component as rows_of
from rlflow.runtime.worker.memories import keepers, tensors_of

if TYPE_CHECKING:
    from rlflow.contract.values import Shard
    from rlflow.runtime.worker.loaded import Loaded
    from rlflow.runtime.worker.worker import Worker

MASTER = "master."
register_faults("save:snapshot", "save:written")


class Saver:
    """Takes snapshots of what a worker holds, one at a time, and writes them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._buffers = HostBuffers()
        self._snapshot: Snapshot | None = None
        self._size = 0

    def held(self) -> dict[str, dict[str, SavedPiece]]:
        """The places of what is trained here, by component and tensor."""
        return {
            component: {name: SavedPiece(shard.shape, shard.box) for name, shard in shards.items()}
            for loaded in self._worker.trained()
            for component, shards in loaded.saved().items()
        }

    def counters(self) -> dict[str, dict[str, int]]:
        """What belongs to optimizers and is no tensor, by model."""
        trained = self._worker.trained()
        return {each.instance.model: each.trainer.optimizer_meta() for each in trained}

    @property
    def size(self) -> int:
        """Bytes of the files of the snapshot that was taken last."""
        return self._size

    @property
    def shards(self) -> dict[str, ShardOf]:
        """None: where one process holds a model, its files are whole components."""
        return {}

    def take(self, orders: Mapping[str, ToWrite]) -> int:
        """Take a snapshot of what this process is to write; bytes of its files.

        `orders` are by component; rows that nodes keep here are files of their own. Raises
        NumericsError E652 for weights or moments that are not finite.
        """
        files: dict[str, tuple[str, dict[str, Keep]]] = {}
        for loaded in self._worker.trained():
            resting = loaded.resting()
            for component, shards in loaded.saved().items():
                if component in orders:
                    order = orders[component]
                    files[order.file] = (
                        component,
                        {
                            name: Keep(
                                tensor=shards[name].tensor, resting=(component, name) in resting
                            )
                            for name in order.names
                        },
                    )
        world = self._worker.world
        for node, kept in self._worker.store.memory.items():
            if world is not None and world.own != keepers(self._worker.plan)[node][0]:
                continue
            part = {n: Keep(tensor=t, resting=False) for n, t in tensors_of(kept).items()}
            files[rows_of(node) + SUFFIX] = rows_of(node), part
        trained = {part for each in self._worker.trained() for part in each.saved()}
        self._snapshot = take_snapshot(files, self._buffers, trained)
        self._worker.recorder.flush()
        self._size = self._snapshot.size
        fault("save:snapshot")
        return self._size

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write the snapshot's files and let go of it; each one's size and digest."""
        assert self._snapshot is not None, "nothing was taken"
        try:
            found = self._snapshot.write(directory)
        finally:
            self._snapshot = None
        fault("save:written")
        return found

    def give_up(self) -> None:
        """Have a write that runs in another thread end soon."""
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot.give_up()


def shards_of(
    orders: Mapping[int, Mapping[str, ToWrite]],
    held: Mapping[int, Mapping[str, Mapping[str, SavedPiece]]],
) -> dict[str, ShardOf]:
    """What the files are to hold that are a part of a component, by their names."""
    writers: dict[str, int] = {}
    for parts in orders.values():
        for component in parts:
            writers[component] = writers.get(component, 0) + 1
    return {
        order.file: ShardOf(
            component=component,
            pieces={name: held[device][component][name] for name in order.names},
        )
        for device, parts in orders.items()
        for component, order in parts.items()
        if writers[component] > 1
    }


def restore_components(
    loaded: Loaded,
    files: Mapping[str, Sequence[StoredFile]],
    meta: Mapping[str, int],
    version: int,
) -> None:
    """Fill this process's shards from the components' files; raises CheckpointError for others.

    Of weights that are trained on float32 copies the copies are read, and the weights are those
    rounded. Where the counters say so, moments begin at zero.
    """
    model, optimizer = loaded.instance.model, loaded.optimizer
    with loaded.awake():
        weights = loaded.trained_shards()
        moments: dict[str, Shard] = {}
        if optimizer is not None:
            weights |= optimizer.saved_masters()
            moments = optimizer.saved_moments()
        kept = files.get(f"{model}.optimizer", ())
        with open_component(files[model]) as stored, open_component(kept) as beside:
            # A checkpoint of format 1 has float32 copies beside the moments.
            copies = {n.removeprefix(MASTER): t for n, t in beside.items() if n.startswith(MASTER)}
            some = loaded.instance.pp > 1
            _fill(model, weights, stored, copies, some=some)
            if not meta.get(FRESH):
                own = {n: t for n, t in beside.items() if not n.startswith(MASTER)}
                fitted = own if optimizer is None else optimizer.fitted(own)
                _fill(f"{model}.optimizer", moments, fitted, {}, some=some)
        if optimizer is not None:
            with torch.no_grad():
                optimizer.round_masters()
        loaded.restored(meta, version)


def _fill(
    component: str,
    shards: Mapping[str, Shard],
    stored: Mapping[str, Any],
    better: Mapping[str, Any],
    *,
    some: bool,
) -> None:
    """Read shards from what is stored, of some names from something `better`.

    These are all that is stored, or but `some` of it: those of a stage.
    """
    from rlflow.engines.hf.weights.filling import fill

    wrong = shards.keys() - stored.keys()
    wrong |= set() if some else stored.keys() - shards.keys()
    wrong |= {
        name
        for name in stored.keys() & shards.keys()
        if tuple(stored[name].get_shape()) != shards[name].shape
    }
    if wrong:
        raise CheckpointError(
            Finding(
                code="E760",
                what=f"the checkpoint's {component} is not that of this pipeline",
                got=f"{len(wrong)} tensors missing, unknown or of another shape",
                expected=f"{len(shards)} tensors; {min(wrong)!r} differs",
            )
        )
    with torch.no_grad():
        for name, shard in shards.items():
            fill(shard, better.get(name, stored[name]), name, None)
