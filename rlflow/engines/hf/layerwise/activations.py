"""What autograd saves of decoder layers, in host memory from their forward to their backward.

As vDNN (Rhu et al. 2016, arXiv:1602.08124) does for layers of convolutions: a layer's saved tensors
leave while the next layer computes, and come back while the backward of the next layer does; of the
last layer nothing leaves. With `recompute_layers` those are the inputs of layers alone. This file
knows where a model's layers are, not what they compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlflow.engines import pinned
from rlflow.engines.hf.flat import storage_of
from rlflow.engines.hf.forward.ahead import tensors_within
from rlflow.engines.hf.forward.attention import current_state
from rlflow.engines.hf.layers import side_stream
from rlflow.engines.hf.recompute import decoder_layers
from rlflow.modelfiles.hosted import ALIGNMENT, LEAST_BYTES, PIECE_BYTES, layers_on_host

Left = TypeVar("Left")


class HostPieces:
    """Host memory in equal pieces, which passes take and give back; beside CUDA it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count = 0
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """A piece that nobody has, uint8 `[PIECE_BYTES]`."""
        if self._free:
            return self._free.pop()
        self.count += 1
        return pinned.host_zeros(PIECE_BYTES, torch.uint8, self.device)

    def give_back(self, pieces: Iterable[Tensor]) -> None:
        """Take pieces back."""
        self._free.extend(pieces)

    def num_bytes(self) -> int:
        """Bytes of all pieces, whoever has them."""
        return self.count * PIECE_BYTES


class PassMemory:
    """The host memory of one forward and its backward; it goes back when nobody refers to it."""

    def __init__(self, pieces: HostPieces) -> None:
        self._source = pieces
        self._taken: list[Tensor] = []
        self._used = PIECE_BYTES
        weakref.finalize(self, pieces.give_back, self._taken).atexit = False

    def take(self, size: int) -> list[Tensor]:
        """So many bytes, as uint8 slices of pieces in their order."""
        found = []
        while size:
            if self._used >= PIECE_BYTES:
                self._taken.append(self._source.take())
                self._used = 0
            part = self._taken[-1][self._used :][:size]
            found.append(part)
            size -= len(part)
            self._used += -(-len(part) // ALIGNMENT) * ALIGNMENT
        return found


class HostedStorage:
    """The bytes of one storage: on the device as `present`, in `host` memory, or in both."""

    __slots__ = ("__weakref__", "host", "present", "size")

    def __init__(self, present: Tensor) -> None:
        self.present: Tensor | None = present
        self.host: list[Tensor] = []
        self.size = len(present)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What of it on the device belongs to each slice of the host's memory."""
        assert self.present is not None
        start = 0
        for part in self.host:
            yield self.present[start : start + len(part)], part
            start += len(part)


@dataclass(frozen=True, slots=True)
class SavedPlace:
    """Where a saved tensor lies: a storage of a layer, and how it lies in it."""

    layer: HostedLayer
    stored: HostedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostedLayer:
    """The saved tensors of one layer in one pass.

    Of a layer that `stays` they are on the device all the time. Places refer to layers and layers
    to those before them, never the other way: what no place refers to is gone at once.
    """

    def __init__(
        self, lane: CopyLane, memory: PassMemory, before: HostedLayer | None, *, stays: bool
    ) -> None:
        self.lane = lane
        self.memory = memory
        self.before = before
        self.stays = stays
        self._own: dict[int, HostedStorage] = {}
        self._weights: set[int] = set()
        self._leaving: list[HostedStorage] = []
        self._left: torch.cuda.Event | None = None
        self._away: list[weakref.ref[HostedStorage]] = []
        self._arrived: torch.cuda.Event | None = None

    def run(self, module: nn.Module, plain: Callable[..., Left], *args: Any, **kwargs: Any) -> Left:
        """Call a layer's own forward; what it saves has left the device two layers later."""
        state = current_state()
        self._weights = set(map(storage_key, (*module.parameters(), *module.buffers())))
        with saved_tensors_hooks(self.pack, unpack):
            made = plain(*args, **kwargs)
        if self.before is not None:
            self.before.drop()
        # What is of all layers is there anyway: positions, and where the rows lie.
        shared = set(map(storage_key, tensors_within((kwargs, vars(state)))))
        if not self.stays:
            self._leave([each for key, each in self._own.items() if key not in shared])
        self._own = {}
        return made

    def pack(self, tensor: Tensor) -> Tensor | SavedPlace:
        """Where a tensor lies that autograd saves; itself if it is small, or a weight's."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if type(tensor) is not Tensor or storage.nbytes() < LEAST_BYTES or key in self._weights:
            return tensor
        if key not in self._own:
            self._own[key] = HostedStorage(storage_of(tensor))
        lies = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return SavedPlace(self, self._own[key], *lies)

    def _leave(self, leaving: list[HostedStorage]) -> None:
        """Begin to copy storages to the host, after what is queued so far."""
        for each in leaving:
            each.host = self.memory.take(each.size)
        self._left = self.lane.copy((part, own) for e in leaving for own, part in e.pairs())
        self._leaving = leaving
        self._away = [weakref.ref(each) for each in leaving]

    def drop(self) -> None:
        """Let go of what has been copied to the host, or will be before any later work."""
        self.lane.wait(self._left)
        self._left = None
        for each in self._leaving:
            each.present = None
        self._leaving = []

    def fetch(self) -> None:
        """Begin to bring back what is still asked for, once."""
        found = [each for ref in self._away if (each := ref()) is not None]
        self._away = []
        coming = [each for each in found if each.present is None]
        for each in coming:
            each.present = torch.empty(each.size, dtype=torch.uint8, device=self.lane.device)
        if coming:
            self._arrived = self.lane.copy(pair for each in coming for pair in each.pairs())

    def tensor_at(self, place: SavedPlace) -> Tensor:
        """A saved tensor; the layer before this one begins to come."""
        self.fetch()
        self.lane.wait(self._arrived)
        self._arrived = None
        if self.before is not None:
            self.before.fetch()
            self.before = None
        present = place.stored.present
        assert present is not None
        made = torch.empty(0, dtype=place.dtype, device=present.device)
        return made.set_(present.untyped_storage(), place.offset, place.shape, place.stride)


class CopyLane:
    """Copies beside the compute of a CUDA device, one after the other; elsewhere in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = side_stream(device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy to the first of each pair from the second, after what is queued; when it is done."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self.stream.record_event()
            return done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Let no later work begin before a copy is done."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)


class HostedActivations:
    """The layers of a module whose saved tensors lie in host memory, and that memory."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.leave = layers_on_host(count)
        self.lane = CopyLane(device)
        self.pieces = HostPieces(device)
        self._last: HostedLayer | None = None

    def through(
        self,
        index: int,
        module: nn.Module,
        plain: Callable[..., Left],
        *args: Any,
        **kwargs: Any,
    ) -> Left:
        """The forward of layer `index`; without gradient its own."""
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        before, self._last = self._last, None
        if index == 0 or before is None:
            del before  # What it had of the host may be taken again.
            before, memory = None, PassMemory(self.pieces)
        else:
            memory = before.memory
        layer = HostedLayer(self.lane, memory, before, stays=index >= self.leave)
        made = layer.run(module, plain, *args, **kwargs)
        if index < self.leave:
            self._last = layer
        return made


def offload_activations(module: nn.Module, device: torch.device) -> HostedActivations:
    """Keep in host memory what autograd saves of every decoder layer but the last.

    Gradients are those of the plain layers bit for bit; without gradient nothing changes. Call it
    after everything else that replaces forwards. Raises UsageError for a module without such
    layers.
    """
    layers = decoder_layers(module)
    hosted = HostedActivations(len(layers), device)
    for index, layer in enumerate(layers.values()):
        layer.forward = partial(hosted.through, index, layer, layer.forward)
    return hosted


def storage_key(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    key: int = tensor.untyped_storage()._cdata
    return key


def unpack(packed: Tensor | SavedPlace) -> Tensor:
    """What was packed."""
    return packed.layer.tensor_at(packed) if isinstance(packed, SavedPlace) else packed
