"""Bytes of the tensors that are alive on a device, of what kind, and the most at once.

Every tensor that an operator makes is seen as it is made, and its storage until it is freed or
resized; so the figures are those of torch's caching allocator, `max_memory_allocated`, without
one. This file knows neither models nor plans.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What torch's caching allocator rounds sizes up to, `kMinBlockSize` of CUDACachingAllocator.
BLOCK = 512
# What is made in a block with this label is on no device, and is never counted.
ELSEWHERE = "elsewhere"

KindOf = Callable[[Tensor], str | None]


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages on devices of a type within the block, by kind.

    A storage is of the kind that `kind_of` says of the tensor that was made on it, else of the kind
    of the `labelled` block in which it was made. Storages that are there before are counted
    where an operator first meets them. It is a device's memory as a worker asks for it.
    """

    def __init__(self, device: str, kind_of: KindOf | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._kind_of = kind_of
        self._label = "other"
        self._known: dict[int, tuple[int, str, Any]] = {}
        self._resize: Any = None
        self.gifts = 0
        self.held: Counter[str] = Counter()
        self.now = 0
        self.most = 0
        self.at_most: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and take note of what it has made."""
        output = self.computed(func, args, kwargs or {})
        for leaf in tree_leaves((args, kwargs, output)):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self.note(leaf)
        return output

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator makes."""
        return func(*args, **kwargs)

    def note(self, tensor: Tensor) -> None:
        """Count a tensor's storage, if it is not counted yet."""
        parts = getattr(tensor, "_local_tensor", None)
        if parts is not None:
            self.note(parts)
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            told = None if self._kind_of is None else self._kind_of(tensor)
            watched = weakref.finalize(storage, self._freed, storage._cdata)
            watched.atexit = False
            counted = self._label != ELSEWHERE
            kind = (told or self._label) if counted else ELSEWHERE
            self._known[storage._cdata] = (0, kind, watched)
            self._sized(storage._cdata, storage.nbytes())

    def relabel(self, tensor: Tensor, kind: str) -> None:
        """Say of what kind a tensor's storage is."""
        self.note(tensor)
        key = tensor.untyped_storage()._cdata
        size, before, watched = self._known[key]
        self._known[key] = (size, kind, watched)
        self.held[before] -= size
        self.held[kind] += size

    def _sized(self, key: int, size: int) -> None:
        before, kind, watched = self._known[key]
        if kind == ELSEWHERE:
            return
        rounded = -(-size // BLOCK) * BLOCK
        self._known[key] = (rounded, kind, watched)
        self.held[kind] += rounded - before
        self.now += rounded - before
        if self.now > self.most:
            self.most = self.now
            self.at_most = dict(self.held)

    def _freed(self, key: int) -> None:
        size, kind, _ = self._known.pop(key)
        self.held[kind] -= size
        self.now -= size

    def restart(self) -> None:
        """Look for the most anew, from what is held now."""
        self.most, self.at_most = self.now, dict(self.held)

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """What is made in the block is of a kind, unless it says another itself."""
        before, self._label = self._label, kind
        try:
            yield
        finally:
            self._label = before

    def __enter__(self) -> LiveStorages:
        """Begin to count; storages that change their size are seen too."""
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = partial_method(self._resized)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave operators and storages as they were."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        self._resize(storage, size)
        if storage._cdata in self._known:
            self._sized(storage._cdata, storage.nbytes())
        return storage

    def allocated(self) -> int:
        """Bytes of live storages."""
        return self.now

    def reserved(self) -> int:
        """The same: nothing is kept of what is freed."""
        return self.now

    def free(self) -> int:
        """Nothing is known of a device that is not there."""
        return 0

    def wait(self) -> None:
        """Nothing is computed."""

    def give_back(self) -> None:
        """Count that memory went to other processes."""
        self.gifts += 1


def partial_method(function: Callable[..., Any]) -> Any:
    """A function that a class calls as its method, with the object first."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return partial(function, self)(*args, **kwargs)

    return method
