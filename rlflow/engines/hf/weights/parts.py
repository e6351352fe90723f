"""Tensors of files as parts of parameters: files may have each expert apart that a module stacks.

transformers takes the parameters of a module apart when it saves it. Here it does so without
numbers and without copies, so that each tensor that comes of it is still a view, and says of which
parameter it is which box. This file reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.contract.values import Box, Shard
from rlflow.engines.hf.weights.names import repeated_parameters
from rlflow.engines.reshard.boxes import intersection, whole_box


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of files: its box in a module's tensor `own`, and which dimensions of that it has.

    In the dimensions that it does not have its box is of size one.
    """

    own: str
    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return tuple(self.box[dim][1] - self.box[dim][0] for dim in self.dims)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the module's tensor."""
        return tuple(slice(*bounds) for bounds in self.box)

    def place(self, shape: tuple[int, ...]) -> int | None:
        """Elements before its first one, in the memory of a module's tensor of that `shape`.

        None where it does not lie there in one piece.
        """
        found = self.of(torch.empty(shape, device="meta"))
        return int(found.storage_offset()) if found.is_contiguous() else None

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a module's whole tensor that it is."""
        held: Any = tuple(
            slice(start, stop) if dim in self.dims else start
            for dim, (start, stop) in enumerate(self.box)
        )
        return tensor[held]

    def within(self, shard: Shard) -> Shard | None:
        """What a shard of the module's tensor has of it, as a shard of the file's tensor.

        A view of the same memory; None where it has nothing of it.
        """
        common = intersection(self.box, shard.box)
        if common is None:
            return None
        held: Any = tuple(
            slice(a - start, b - start) if dim in self.dims else a - start
            for dim, ((a, b), (start, _)) in enumerate(zip(common, shard.box, strict=True))
        )
        box = tuple(
            (common[dim][0] - self.box[dim][0], common[dim][1] - self.box[dim][0])
            for dim in self.dims
        )
        return Shard(shape=self.shape, box=box, tensor=shard.tensor[held])


def parts_in_files(
    module: Any, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, StoredPart] | None:
    """The part of every tensor of a module's files by its name there.

    `shapes` are those of whole tensors, by name, where the module has but a part of them. None
    where files have tensors that are no parts of the module's, but made of them otherwise.
    """
    from transformers.core_model_loading import revert_weight_conversion

    left_out = set(module._keys_to_ignore_on_save or ()) | repeated_parameters(module)
    held = {n: t for n, t in module.state_dict().items() if n not in left_out}
    known = shapes or {}
    empty = {
        name: torch.empty(known.get(name, tensor.shape), dtype=tensor.dtype, device="meta")
        for name, tensor in held.items()
    }
    own = {_storage(tensor): name for name, tensor in empty.items()}
    try:
        with _Uncopied(), _as_written(module):
            stored = revert_weight_conversion(module, dict(empty))
    except RuntimeError:  # taking tensors apart asks for numbers, which these have not
        return None
    if not all(_storage(tensor) in own for tensor in stored.values()):
        return None
    found = {
        name: _part(own[_storage(tensor)], empty[own[_storage(tensor)]], tensor)
        for name, tensor in stored.items()
    }
    parts = {name: part for name, part in found.items() if part is not None}
    complete = len(parts) == len(stored) and _cover(parts.values(), empty)
    return parts if complete else None


@contextmanager
def _as_written(module: Any) -> Iterator[None]:
    """Within it a module that FSDP has given a class is of the class that transformers knows."""
    given = type(module)
    module.__class__ = next(each for each in given.__mro__ if not issubclass(each, FSDPModule))
    try:
        yield
    finally:
        module.__class__ = given


def whole_part(own: str, tensor: Tensor) -> StoredPart:
    """All of a tensor of a module."""
    return StoredPart(own, whole_box(tuple(tensor.shape)), tuple(range(tensor.dim())))


class _Uncopied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it a copy of a tensor is a view of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do one operation."""
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _part(own: str, whole: Tensor, tensor: Tensor) -> StoredPart | None:
    """Which part of `whole` a view of it is; None for one that turns it."""
    if (tensor.shape, tensor.stride()) == (whole.shape, whole.stride()):
        return whole_part(own, whole)
    starts, offset = [], int(tensor.storage_offset())
    for stride in whole.stride():
        starts.append(offset // stride)
        offset %= stride
    dims: list[int] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        left = range(dims[-1] + 1 if dims else 0, whole.dim())
        same = [dim for dim in left if whole.stride(dim) == stride and size <= whole.shape[dim]]
        if not same:
            return None
        dims.append(same[0])
    sizes = dict(zip(dims, tensor.shape, strict=True))
    box = tuple((start, start + sizes.get(dim, 1)) for dim, start in enumerate(starts))
    return StoredPart(own, box, tuple(dims))


def _cover(parts: Collection[StoredPart], whole: Mapping[str, Tensor]) -> bool:
    """Whether every element of every tensor is in one part."""
    found = dict.fromkeys(whole, 0)
    for part in parts:
        found[part.own] += torch.Size(part.shape).numel()
    return all(found[name] == tensor.numel() for name, tensor in whole.items())
