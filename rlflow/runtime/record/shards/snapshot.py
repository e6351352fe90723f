"""Tensors as they were at one moment, in host memory, and the files that they become.

What can change meanwhile is copied, into memory that saves use again; what lies on the host and
never changes (a part asleep) is held as it is, and looked at again once it is written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlflow.engines.hf.flat import beside_compute
from rlflow.engines.pinned import pinned_pool
from rlflow.errors import CheckpointError, Finding, NumericsError
from rlflow.runtime.record.checkpoint import COMPONENT_POINTS
from rlflow.runtime.record.durable import FileRecord, disk_errors, write_file
from rlflow.runtime.record.tensorfile import header_of, ordered

# Bytes of one piece of host memory: what was taken for one save is enough for most of the next.
CHUNK = 256 << 20


class HostBuffers:
    """Host memory for one snapshot at a time, pinned where its tensors come from a GPU."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self._memory: list[Tensor] = []
        self._at = 0
        self._used = 0

    def reserve(self, size: int, *, pinned: bool) -> None:
        """Have memory for so many bytes, and begin to give it from its start again."""
        missing = size - sum(len(piece) for piece in self._memory)
        while missing > 0:
            piece = min(missing, self.chunk)
            made = pinned_pool().lend(piece) if pinned else torch.empty(piece, dtype=torch.uint8)
            self._memory.append(made)
            missing -= piece
        self._at = self._used = 0

    def take(self, size: int) -> list[Tensor]:
        """The next so many bytes that are reserved, as uint8 `[bytes]` pieces."""
        found = []
        while size:
            piece = self._memory[self._at][self._used :][:size]
            if not len(piece):
                self._at, self._used = self._at + 1, 0
                continue
            found.append(piece)
            self._used += len(piece)
            size -= len(piece)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A tensor to save; `resting` where it lies on the host and nobody changes it."""

    tensor: Tensor
    resting: bool


@dataclass(slots=True)
class _File:
    """A file to be: its first bytes, then pieces of host memory; tensors to look at again."""

    header: bytes
    size: int
    pieces: list[Tensor] = field(default_factory=list)
    resting: list[tuple[str, Tensor, int]] = field(default_factory=list)


class Snapshot:
    """Files to be, by name, whose bytes are all in host memory."""

    def __init__(self, files: Mapping[str, _File]) -> None:
        self._files = files
        self._given_up = threading.Event()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files.values())

    def give_up(self) -> None:
        """Have a write that runs in another thread end soon, with InterruptedError."""
        self._given_up.set()

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write and sync the files; each one's size and digest, which is made meanwhile.

        Raises CheckpointError: for the disk, and E726 where a part that was asleep was changed.
        """
        with disk_errors(CheckpointError, f"write into {directory.parent}", directory.parent):
            return {
                name: write_file(directory / name, self._bytes(name, file), COMPONENT_POINTS)
                for name, file in self._files.items()
            }

    def _bytes(self, name: str, file: _File) -> Iterator[bytes | memoryview]:
        yield file.header
        for piece in file.pieces:
            if self._given_up.is_set():
                raise InterruptedError(f"{name} was given up")
            yield piece.numpy().data
        for tensor, held, version in file.resting:
            if held._version != version:
                raise CheckpointError(
                    Finding(
                        code="E726",
                        what=f"{name}: {tensor!r} was changed on the host while it was saved",
                        expected="a part asleep to stay as it is until it is woken",
                    )
                )


def take_snapshot(
    files: Mapping[str, tuple[str, Mapping[str, Keep]]],
    buffers: HostBuffers,
    finite: Collection[str] = (),
) -> Snapshot:
    """Copy what can change, and hold what rests; `files` are by name a component's tensors.

    Raises NumericsError E652 where a number of one of the components `finite` is not.

    Copies of a device's tensors run on a stream of their own; this waits for them. The snapshot
    is whole until the next one is taken into the same buffers.
    """
    moving = [k.tensor for _, part in files.values() for k in part.values() if not k.resting]
    size = sum(tensor.numel() * tensor.element_size() for tensor in moving)
    buffers.reserve(size, pinned=any(tensor.device.type == "cuda" for tensor in moving))
    found: dict[str, _File] = {}
    with torch.no_grad(), beside_compute(moving):
        for name, (component, part) in files.items():
            tensors = {key: keep.tensor for key, keep in part.items()}
            if component in finite:
                _require_finite(component, tensors)
            file = found[name] = _File(*header_of(component, tensors))
            for key, _ in ordered(tensors):
                _add(file, key, part[key], buffers)
    return Snapshot(found)


def _require_finite(component: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise NumericsError E652 for a tensor that holds a number which is not finite.

    Sums tell: one that is finite has finite parts only.
    """
    floats = {name: each.detach() for name, each in tensors.items() if each.is_floating_point()}
    sums = [each.sum(dtype=torch.float64) for each in floats.values()]
    for (name, tensor), total in zip(floats.items(), sums, strict=True):
        if not bool(total.isfinite()) and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise NumericsError(
                Finding(
                    code="E652",
                    what=f"{component}: {name!r} is not finite, so it is not saved",
                    got=f"{bad:,} of {tensor.numel():,} numbers are not",
                    expected="finite weights and moments: the model has diverged",
                    fix="a lower lr: --set lr=... --allow-changes lr, beside --resume",
                )
            )


def _add(file: _File, name: str, keep: Keep, buffers: HostBuffers) -> None:
    """Put one tensor's bytes behind those of a file."""
    row = keep.tensor.detach().contiguous().reshape(-1)
    raw = row.view(torch.uint8)
    if keep.resting:
        file.resting.append((name, keep.tensor, keep.tensor._version))
        file.pieces.extend(torch.split(raw, buffers.chunk) if len(raw) else ())
        return
    for piece in buffers.take(len(raw)):
        part, raw = raw[: len(piece)], raw[len(piece) :]
        piece.copy_(part, non_blocking=True)
        file.pieces.append(piece)
