"""The parameters of a module as slices of one buffer per dtype.

One buffer makes sleeping one call, an optimizer step one kernel and neighbouring weights one
matrix. Matrices come first, then vectors, each in the module's order; slices start on 64
bytes. This file knows neither what the module computes nor who trains it.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rlflow.contract.values import Shard
from rlflow.engines.pinned import ALIGNMENT, memory_like


class BufferMaker(Protocol):
    """What makes a buffer."""

    def __call__(self, count: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros `[count]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where a parameter lies in its dtype's buffer, in elements."""

    dtype: torch.dtype
    start: int
    stop: int
    shape: torch.Size


class FlatParameters:
    """Moves a module's parameters into buffers; they stay the same Parameter objects.

    `names` are those to move, None all of them. On another `device` than theirs they arrive one by
    one, each in its place, so that the device never holds a weight twice. Those of a skeleton, on
    the meta device, bring nothing: they are zero, to be filled. `memory` makes the buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Container[str] | None = None,
        device: torch.device | None = None,
        memory: BufferMaker = torch.zeros,
    ) -> None:
        wanted = (item for item in module.named_parameters() if names is None or item[0] in names)
        named = sorted(wanted, key=lambda item: item[1].ndim < 2)
        self.parameters: dict[str, nn.Parameter] = dict(named)
        self.slots: dict[str, _Slot] = {}
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.device = device
        self._memory = memory
        # Where the matrices end and the vectors begin.
        self.matrices: dict[torch.dtype, int] = {}
        for dtype in dict.fromkeys(parameter.dtype for _, parameter in named):
            self.gather([item for item in named if item[1].dtype == dtype], dtype)

    def gather(self, named: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
        """Lay out the parameters of one dtype and point them into its buffer."""
        step = ALIGNMENT // dtype.itemsize
        end = 0
        self.matrices[dtype] = 0
        for name, parameter in named:
            stop = end + parameter.numel()
            self.slots[name] = _Slot(dtype=dtype, start=end, stop=stop, shape=parameter.shape)
            end = -(-stop // step) * step
            if parameter.ndim >= 2:
                self.matrices[dtype] = end
        device = named[0][1].device if self.device is None else self.device
        buffer = self._memory(end, dtype=dtype, device=device)
        self.buffers[dtype] = buffer
        for name, parameter in named:
            view = self.view(name, buffer)
            if not parameter.is_meta:
                view.copy_(parameter.detach())
            point(parameter, view)

    def view(self, name: str, buffer: Tensor) -> Tensor:
        """A parameter's slice of any buffer laid out like its dtype's."""
        slot = self.slots[name]
        return buffer[slot.start : slot.stop].view(slot.shape)

    def named(self) -> dict[str, Tensor]:
        """Every parameter's current values, by name; views, not copies."""
        return {
            name: self.view(name, self.buffers[slot.dtype]) for name, slot in self.slots.items()
        }

    def num_bytes(self) -> int:
        """Bytes of all parameters, the padding between them left out."""
        return sum((slot.stop - slot.start) * slot.dtype.itemsize for slot in self.slots.values())


def point(parameter: nn.Parameter, view: Tensor) -> None:
    """Have a parameter lie in a view, maybe on another device; it stays the same object."""
    if parameter.device == view.device:
        parameter.data = view
        return
    moved = nn.Parameter(view, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]


def whole_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Tensors that this process holds in full, as shards of themselves."""
    return {
        name: Shard(
            shape=tuple(tensor.shape),
            box=tuple((0, size) for size in tensor.shape),
            tensor=tensor,
        )
        for name, tensor in tensors.items()
    }


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a CUDA device on which parts go to the host and come back."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def beside_compute(buffers: list[Tensor]) -> Iterator[None]:
    """Copies in the block begin after what is queued, run beside what is queued later, and end.

    On CUDA they run on a stream of their own; elsewhere nothing is queued.
    """
    devices = {buffer.device for buffer in buffers if buffer.device.type == "cuda"}
    if not devices:
        yield
        return
    (device,) = devices
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def to_host(buffers: Iterable[Tensor]) -> list[Tensor]:
    """Copies in host memory; of a CUDA device's in pages that stay where they are."""
    kept = list(buffers)
    copies = memory_like(kept)
    with beside_compute(kept):
        for copy, buffer in zip(copies, kept, strict=True):
            copy.copy_(buffer, non_blocking=True)
    return copies


def storage_of(tensor: Tensor) -> Tensor:
    """All of a tensor's storage as bytes, `[bytes]`."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def in_storage(storage: Tensor, like: Tensor) -> Tensor:
    """The tensor that lies in a copy of a storage, bytes, as `like` does in the storage."""
    size, stride = like.size(), like.stride()
    return storage.view(like.dtype).as_strided(size, stride, int(like.storage_offset()))


def free(buffers: Iterable[Tensor]) -> None:
    """Give back the storage; the tensors and all views of them keep their identity."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


def restore(buffers: Iterable[Tensor], host: Iterable[Tensor] | None = None) -> None:
    """Allocate the storage again, and fill it with the host's copies if there are any."""
    kept = list(buffers)
    for buffer in kept:
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
    copies = list(host or ())
    with beside_compute(kept[: len(copies)]):
        for buffer, copy in zip(kept, copies, strict=False):
            buffer.copy_(copy, non_blocking=True)
