"""Host memory that devices copy from and to by themselves: pages that stay where they are.

One pool of a process lends it by size and takes back what nobody has any more. Torch's own pinned
memory is rounded up to powers of two and never leaves; here a loan takes whole pages, and all that
is kept is never more than was lent at once. Small copies that live shorter than the
device's work on them stay with torch, which knows when that work is over. This file knows neither
models nor plans.
"""

from __future__ import annotations

import functools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol, SupportsInt

import torch
from torch import Tensor

from rlflow.errors import Finding, RunError
from rlflow.modelfiles.host_memory import pinned_bytes

ALIGNMENT = 64


class Driver(Protocol):
    """What keeps pages in place, and lets them go; both return 0, or the code of an error."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> SupportsInt:
        """Keep `size` bytes from `address` on where they are."""

    def cudaHostUnregister(self, address: int) -> SupportsInt:
        """Let go what was registered at `address`."""


class PinnedPool:
    """Memory lent as uint8 tensors, and kept for the next loan of its size.

    In bytes of whole pages: `lent` is out, `held` is out or idle, `most` was out at once. `held` is
    never above `most`: idle memory goes back to the system before new memory would pass it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._out: dict[int, Tensor] = {}
        self._idle: list[Tensor] = []
        # Where loans have ended, whenever that was: their memory is taken back at the next look.
        self._over: deque[int] = deque()
        self._most = 0
        self._lock = threading.RLock()

    @property
    def lent(self) -> int:
        """Bytes that somebody has."""
        self._take_back()
        return sum(map(len, self._out.values()))

    @property
    def held(self) -> int:
        """Bytes that are kept in place, lent or idle."""
        return self.lent + sum(map(len, self._idle))

    @property
    def most(self) -> int:
        """The most bytes that were lent at once."""
        return self._most

    def lend(self, size: int) -> Tensor:
        """Memory of so many bytes, uint8 `[size]`, with any contents, until nobody has it.

        Raises RunError (E518) where the driver does not keep it in place.
        """
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        whole = pinned_bytes(size)
        with self._lock:
            self._most = max(self._most, self.lent + whole)
            found = next((at for at, idle in enumerate(self._idle) if len(idle) == whole), None)
            memory = self._made(whole) if found is None else self._idle.pop(found)
            self._out[memory.data_ptr()] = memory
        # A storage of its own, which ends with the last view of it.
        loan = torch.frombuffer(memory.numpy(), dtype=torch.uint8, count=size)
        weakref.finalize(loan.untyped_storage(), self._over.append, memory.data_ptr())
        return loan

    def lend_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Memory for copies of tensors, contiguous and side by side in one loan."""
        ends, end = [], 0
        for tensor in tensors:
            end = -(-end // ALIGNMENT) * ALIGNMENT + tensor.nbytes
            ends.append(end)
        loan = self.lend(end)
        return [
            loan[end - tensor.nbytes : end].view(tensor.dtype).view(tensor.shape)
            for tensor, end in zip(tensors, ends, strict=True)
        ]

    def _take_back(self) -> None:
        with self._lock:
            while self._over:
                self._idle.append(self._out.pop(self._over.popleft()))

    def _made(self, size: int) -> Tensor:
        """New memory in place, once idle memory has made room for it."""
        self._idle.sort(key=len)
        while self._idle and self.held + size > self._most:
            self._let_go(self._idle.pop())
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        pin(self._driver, memory)
        return memory

    def _let_go(self, memory: Tensor) -> None:
        self._driver.cudaHostUnregister(memory.data_ptr())


def pin(driver: Driver, memory: Tensor) -> None:
    """Keep the pages of uint8 `memory` where they are; RunError (E518) where that is refused."""
    code = int(driver.cudaHostRegister(memory.data_ptr(), len(memory), 0))
    if code:
        raise RunError(
            Finding(
                code="E518",
                what="host memory that a device copies by itself cannot be pinned",
                got=f"CUDA error {code} for {len(memory)} bytes",
                fix="a higher limit of locked memory: ulimit -l",
            )
        )


@functools.cache
def cuda_driver() -> Driver:
    """The CUDA runtime that torch has loaded."""
    driver: Driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return driver


@functools.cache
def pinned_pool() -> PinnedPool:
    """The pool of this process."""
    return PinnedPool(cuda_driver())


def host_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros `[count]` in host memory, beside a CUDA device in pages that stay where they are."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=dtype)
    return pinned_pool().lend(count * dtype.itemsize).view(dtype).zero_()


def memory_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory on the host for copies of tensors of one device, beside a CUDA device in place."""
    if any(tensor.device.type == "cuda" for tensor in tensors):
        return pinned_pool().lend_like(tensors)
    return [torch.empty_like(tensor, device="cpu") for tensor in tensors]
