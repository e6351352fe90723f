"""What a checkpoint holds of a model instance, written and read where its shards are.

Parameters are joined one at a time, so that no process ever holds the model, and a file does
not depend on the layout that wrote it. This file knows neither when a checkpoint is due nor
what completes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.checkpoint import COMPONENT_POINTS
from rlflow.runtime.record.durable import FileRecord, disk_errors, write_file
from rlflow.runtime.record.resuming import FRESH
from rlflow.runtime.record.tensorfile import header_of, ordered, raw_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.contract.values import Shard
    from rlflow.runtime.worker.loaded import Loaded
    from rlflow.runtime.worker.world import World


def component_sizes(loaded: Loaded) -> dict[str, int]:
    """Bytes of each component's file."""
    with loaded.awake():
        return {
            name: header_of(name, _whole(shards))[1] for name, shards in loaded.components().items()
        }


def save_component(
    loaded: Loaded, component: str, path: Path | None, world: World | None
) -> FileRecord | None:
    """Write a component with the instance's other ranks; those without a `path` only send.

    Every rank of the instance calls it; the one with a path is the first of its devices.
    """
    with loaded.awake():
        shards = loaded.components()[component]
        whole = _whole(shards)
        parts = _streamed({name: shards[name] for name, _ in ordered(whole)}, loaded, world)
        if path is None:
            for _ in parts:
                pass
            return None
        header, _ = header_of(component, whole)
        with disk_errors(CheckpointError, f"save {path.name}", path.parent):
            return write_file(path, _bytes(header, parts), COMPONENT_POINTS)


def restore_components(
    loaded: Loaded, files: Mapping[str, Path], meta: Mapping[str, int], version: int
) -> None:
    """Fill this process's shards from the components' files; raises CheckpointError for others.

    Where the counters say so, moments begin at zero: of an optimizer's file the float32 copies
    of lower weights are read alone.
    """
    from rlflow.engines.hf.sharded.loading import fill_from_safetensors

    with loaded.awake():
        for component, held in loaded.components().items():
            shards: Mapping[str, Shard] = held
            copies = bool(meta.get(FRESH)) and component.endswith(".optimizer")
            if copies:
                shards = {name: s for name, s in held.items() if name.startswith("master.")}
            if not shards:
                continue
            file = files[component]
            _require_fitting(component, shards, file, part=copies)
            fill_from_safetensors(shards, dict.fromkeys(shards, file))
        loaded.restored(meta, version)


def _require_fitting(
    component: str, shards: Mapping[str, Shard], file: Path, *, part: bool
) -> None:
    """Raise CheckpointError unless a file holds these tensors; and no others, but of a `part`."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        names = set(tensors.keys())
        wrong = set(shards) - names if part else names ^ set(shards)
        names &= set(shards)
        wrong |= {
            name
            for name in names - wrong
            if tuple(tensors.get_slice(name).get_shape()) != shards[name].shape
        }
    if wrong:
        raise CheckpointError(
            Finding(
                code="E760",
                what=f"{file} is not {component} of this pipeline",
                got=f"{len(wrong)} tensors missing, unknown or of another shape",
                expected=f"{len(shards)} tensors; {sorted(wrong)[0]!r} differs",
            )
        )


def _whole(shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """Each parameter's whole shape and dtype, without memory."""
    return {
        name: torch.empty(shard.shape, dtype=shard.tensor.dtype, device="meta")
        for name, shard in shards.items()
    }


def _streamed(
    shards: Mapping[str, Shard], loaded: Loaded, world: World | None
) -> Iterator[Tensor | None]:
    """Whole parameters in order; None on the ranks that only send."""
    group = None if world is None else world.group(loaded.instance)
    if group is None:
        yield from (shard.tensor for shard in shards.values())
        return
    from rlflow.engines.reshard.gather import stream_whole

    yield from (tensor for _, tensor in stream_whole(shards, group, to=0))


def _bytes(header: bytes, parts: Iterator[Tensor | None]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in parts:
        assert tensor is not None
        yield raw_bytes(tensor)
