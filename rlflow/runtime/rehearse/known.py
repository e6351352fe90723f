"""Small tensors on a device without data whose values are known after all.

Layouts of rows and shapes of pictures come from the host, and what is computed of them alone is as
well known: sizes that a vision tower reads off them are those of a run. Every storage with such
values has a twin on the CPU, on which operators are repeated. This file knows no models.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Elements of the largest tensors that are known: whole numbers, and others, such as positions.
MOST_WHOLE, MOST_OTHER = 1 << 21, 1 << 16
# Operators whose results have as many elements as their values say.
SIZED_BY_VALUES = {
    *("nonzero", "repeat_interleave", "masked_select", "bincount", "index", "_unique2"),
    "unique_consecutive",
}
# Operators that make values of numbers alone.
MADE = {"arange", "linspace", "zeros", "ones", "full", "scalar_tensor"}


class KnownValues:
    """The twins of storages on a `device` without data."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._twins: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor of the device, on the CPU; None where they are not known."""
        if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return None
        twin = self._twins.get(tensor.untyped_storage()._cdata)
        if twin is None:
            return None
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())

    def learn(self, tensor: Tensor, values: Tensor) -> None:
        """Remember the values of a tensor that has a storage of its own."""
        storage = tensor.untyped_storage()
        twin = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        key = storage._cdata
        if key not in self._twins:
            weakref.finalize(storage, self._twins.pop, key, None).atexit = False
        self._twins[key] = twin
        found = self.of(tensor)
        if found is not None:
            found.copy_(values)

    def knows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator makes something on the device, or of it, of known values alone.

        What it changes by others is known no more.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [each for each in tensors if each.device.type == self._device]
        if not there and not self._placed(kwargs):
            return False
        if not tensors:
            return func.overloadpacket.__name__ in MADE
        known = all(is_small(each) for each in tensors)
        known = known and all(self.of(each) is not None for each in there)
        if not known:
            self._forget(func, args, kwargs)
        return known

    def repeated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator makes of values that are known, on the CPU."""

        def twin(value: Any) -> Any:
            there = isinstance(value, Tensor) and value.device.type == self._device
            return self.of(value) if there else value

        given, more = tree_map(twin, (args, kwargs))
        if self._placed(kwargs):
            more = {**more, "device": torch.device("cpu")}
        return func(*given, **more)

    def _placed(self, kwargs: dict[str, Any]) -> bool:
        """Whether an operator is told to make something on the device."""
        said = kwargs.get("device")
        return said is not None and torch.device(said).type == self._device

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Values that an operator changes by what is not known are known no more."""
        for place, said in enumerate(func._schema.arguments):
            if said.alias_info is not None and said.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(said.name)
                for each in leaves(value):
                    self._twins.pop(each.untyped_storage()._cdata, None)

    def take(self, made: Any, values: Any) -> None:
        """Remember what an operator has made, beside the values that it made of the twins."""
        for each, found in zip(leaves(made), leaves(values), strict=True):
            if is_small(each) and self.of(each) is None and each.shape == found.shape:
                self.learn(each, found)

    def places(self, indices: Any) -> list[Any]:
        """Indices of which known masks are the places that they have."""
        found: list[Any] = []
        for each in indices:
            mask = isinstance(each, Tensor) and each.dtype == torch.bool
            values = self.of(each) if mask and each.device.type == self._device else each
            found += values.nonzero().unbind(1) if mask and values is not None else [each]
        return found

    def on_device(self, values: Any) -> Any:
        """Tensors of the device of the sizes that values have, which are known of them."""

        def made(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            found = torch.empty(value.shape, dtype=value.dtype, device=self._device)
            self.learn(found, value)
            return found

        return tree_map(made, values)


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors within a value."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def is_small(tensor: Tensor) -> bool:
    """Whether values of a tensor are kept."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (MOST_WHOLE if whole else MOST_OTHER)
