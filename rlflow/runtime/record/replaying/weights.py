"""How far an update has moved weights, in two checkpoints from after it, and whether bits differ.

Tensors are read one at a time, whole in any layout. Norms are those of all weights of a model that
training changes, float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.runtime.record.checkpoint import stored_files
from rlflow.runtime.record.manifest import Manifest, read_manifest
from rlflow.runtime.record.shards.reading import open_component

OPTIMIZER = ".optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMoved:
    """What became of a model's weights in an update that was computed twice.

    `before` is the norm of the weights before it, `moved` those of what the run's and the replay's
    update added, `apart` that of the difference after them. `cosine` is of the two moves. What
    there is no checkpoint for is None. `same` says whether all bits are equal, those of the
    optimizer's state in `same_state`.
    """

    model: str
    before: float | None
    moved: tuple[float | None, float | None]
    apart: float | None
    cosine: float | None
    same: bool | None
    same_state: bool | None

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def weights_moved(before: Path | None, after: Path | None, again: Path) -> list[WeightsMoved]:
    """Of each trained model, from checkpoints before the update, and after it in run and replay."""
    manifests = [None if path is None else read_manifest(path) for path in (before, after, again)]
    last = manifests[2]
    assert last is not None, "a replay leaves a checkpoint"
    paths = (before, after, again)
    names = [name for name in stored_files(again, last) if not name.endswith(OPTIMIZER)]
    trained = [name for name in names if f"{name}{OPTIMIZER}" in stored_files(again, last)]
    return [_moved(name, paths, manifests) for name in trained]


def _moved(
    name: str, paths: tuple[Path | None, ...], manifests: list[Manifest | None]
) -> WeightsMoved:
    sums: dict[str, float] = dict.fromkeys(("before", "run", "again", "apart", "product"), 0.0)
    same = True
    there = [manifest is not None for manifest in manifests]
    for before, after, again in _tensors(name, paths, manifests):
        if after is not None:
            same = same and _same_bits(after, again)
            sums["apart"] += _square(again.double() - after.double())
        if before is None:
            continue
        sums["before"] += _square(before.double())
        move = again.double() - before.double()
        sums["again"] += _square(move)
        if after is not None:
            other = after.double() - before.double()
            sums["run"] += _square(other)
            sums["product"] += float((move * other).sum())
    norms = {key: math.sqrt(max(value, 0.0)) for key, value in sums.items()}
    lengths = norms["run"] * norms["again"]
    return WeightsMoved(
        model=name,
        before=norms["before"] if there[0] else None,
        moved=(
            norms["run"] if there[0] and there[1] else None,
            norms["again"] if there[0] else None,
        ),
        apart=norms["apart"] if there[1] else None,
        cosine=sums["product"] / lengths if lengths else None,
        same=same if there[1] else None,
        same_state=_same_state(name, paths, manifests) if there[1] else None,
    )


def _tensors(
    name: str, paths: tuple[Path | None, ...], manifests: list[Manifest | None]
) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor]]:
    """Each tensor of a component before the update, after it, and after the replay."""
    with ExitStack() as stack:
        opened: list[Mapping[str, Any] | None] = []
        for path, manifest in zip(paths, manifests, strict=True):
            files = None if path is None or manifest is None else stored_files(path, manifest)
            found = None if files is None or name not in files else files[name]
            opened.append(None if found is None else stack.enter_context(open_component(found)))
        before, after, again = opened
        assert again is not None, "a replay's checkpoint has the model"
        for key, tensor in again.items():
            yield _read(before, key), _read(after, key), tensor[...]


def _read(stored: Mapping[str, Any] | None, key: str) -> Tensor | None:
    return None if stored is None or key not in stored else stored[key][...]


def _same_state(
    name: str, paths: tuple[Path | None, ...], manifests: list[Manifest | None]
) -> bool:
    """Whether moments and counters have the same bits after run and replay."""
    _, after, again = manifests
    assert after is not None, "asked where both are there"
    assert again is not None, "a replay leaves a checkpoint"
    counters = [_counters(manifest, name) for manifest in (after, again)]
    if counters[0] != counters[1]:
        return False
    pairs = _tensors(f"{name}{OPTIMIZER}", (None, *paths[1:]), [None, after, again])
    return all(one is not None and _same_bits(one, other) for _, one, other in pairs)


def _counters(manifest: Manifest, name: str) -> Any:
    optimizers = manifest.state.get("optimizers", {})
    return optimizers.get(name) if isinstance(optimizers, Mapping) else None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _square(tensor: Tensor) -> float:
    return float((tensor * tensor).sum())
