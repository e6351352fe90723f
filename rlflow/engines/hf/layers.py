"""Layers of a frozen model that live on the host and visit the device one after the other.

A layer's weights are copied in before its forward and given up after it; where the device has
streams of its own, the next layer's copy runs beside the present layer's work. The device never
holds more than two layers. This file knows neither what layers compute nor who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.engines import pinned
from rlflow.engines.hf.flat import FlatParameters, free, point, restore
from rlflow.engines.hf.recompute import decoder_layers


class HostLayer:
    """The weights of one layer: in host memory always, on the device from `fetch` to `drop`."""

    def __init__(self, module: nn.Module, names: Iterable[str], device: torch.device) -> None:
        self.device = device
        self.flat = FlatParameters(module, set(names), torch.device("cpu"), self._memory)
        self.host = dict(self.flat.buffers)
        self.visiting = {
            dtype: torch.empty_like(buffer, device=device) for dtype, buffer in self.host.items()
        }
        self.flat.buffers = self.visiting
        for name, parameter in self.flat.parameters.items():
            point(parameter, self.flat.view(name, self.visiting[parameter.dtype]))
        self.present = True
        self.arrived: torch.cuda.Event | None = None
        self.drop()

    def _memory(self, count: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Host memory that stays where it is, for copies that run beside other work."""
        assert device.type == "cpu"
        return pinned.host_zeros(count, dtype, self.device)

    def tensors(self) -> dict[str, Tensor]:
        """The host's weights by name, views of them."""
        return {
            name: self.flat.view(name, self.host[slot.dtype])
            for name, slot in self.flat.slots.items()
        }

    def fetch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Take device memory and begin to fill it, on `stream` if given; `wait` says when done."""
        if self.present:
            return
        self.present = True
        if stream is None:
            restore(self.visiting.values(), self.host.values())
            return
        # The memory may still be read by work queued before this.
        restore(self.visiting.values())
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for dtype, buffer in self.visiting.items():
                buffer.copy_(self.host[dtype], non_blocking=True)
        self.arrived = stream.record_event()

    def wait(self) -> None:
        """Let no later work begin before the weights are there."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
            self.arrived = None

    def drop(self) -> None:
        """Give the device memory back."""
        if self.present:
            self.wait()
            free(self.visiting.values())
            self.present = False


class HostLayers:
    """All decoder layers of a frozen module, each on the device only while it computes.

    Making one moves the weights of the layers to the host and freezes the module. Weights that
    several layers share stay where they are. Raises UsageError for a module without such layers.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        module.requires_grad_(False)
        found = decoder_layers(module)
        self.layers = [HostLayer(module, names, device) for names in own_names(module, found)]
        self.stream = side_stream(device)
        for index, layer in enumerate(found.values()):
            layer.register_forward_pre_hook(partial(self.enter, index))
            layer.register_forward_hook(partial(self.leave, index), always_call=True)

    def enter(self, index: int, *_: Any) -> None:
        """Bring a layer in, and begin to bring the next one where that runs beside."""
        if index == 0:
            self.drop()
        self.layers[index].fetch(self.stream)
        self.layers[index].wait()
        if self.stream is not None and index + 1 < len(self.layers):
            self.layers[index + 1].fetch(self.stream)

    def leave(self, index: int, *_: Any) -> None:
        """Give up a layer's device memory."""
        self.layers[index].drop()

    def drop(self) -> None:
        """Give up the device memory of every layer."""
        for layer in self.layers:
            layer.drop()

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name in host memory, to read or to write; no copy is under way."""
        self.drop()
        if self.stream is not None:
            self.stream.synchronize()
        return {name: tensor for layer in self.layers for name, tensor in layer.tensors().items()}

    def names(self) -> frozenset[str]:
        """The names of the weights that live on the host."""
        return frozenset(name for layer in self.layers for name in layer.flat.slots)

    def num_bytes(self) -> int:
        """Bytes of all layers' weights."""
        return sum(layer.flat.num_bytes() for layer in self.layers)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies that run beside the device's work, where it can have one."""
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
    return stream


def own_names(module: nn.Module, layers: dict[str, nn.Module]) -> list[list[str]]:
    """For every layer the names of the parameters that no other part of the module has."""
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [
        [f"{name}.{own}" for own, p in layer.named_parameters() if uses[id(p)] == 1]
        for name, layer in layers.items()
    ]
