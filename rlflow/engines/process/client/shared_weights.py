"""Weights in memory that two processes see: flat bytes and a table of what lies where.

The memory has no name in the file system, so nothing of it is left when its processes are gone.
The table is for an engine, and has the names of files. This file knows neither engines nor
versions.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlflow.engines.hf.weights.in_files import Entry, FileNames
from rlflow.engines.pinned import ALIGNMENT, cuda_driver, pin


class SharedWeights:
    """Copies of `tensors`, whole and contiguous, in shared memory; `tensors` are views of it.

    Those on the meta device bring nothing: they are zero, to be filled. Each lies on 64 bytes.

    `stored` are the same by their `names` in files, and `table` has a row for each of these: name,
    dtype, shape, offset in bytes. Another process maps `descriptor`, which it inherits.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        names: FileNames | None = None,
        pinned: bool = False,
    ) -> None:
        own: list[Entry] = []
        end = 0
        for name, tensor in tensors.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            own.append((name, kind, tuple(tensor.shape), end))
            end = -(-(end + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        self.size = max(end, ALIGNMENT)
        self.descriptor = os.memfd_create("rlflow-weights")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.size)
        self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, self.size), dtype=torch.uint8)
        if pinned:
            self._pin()
        self.tensors = {name: self._view(kind, shape, at) for name, kind, shape, at in own}
        for name, tensor in tensors.items():
            if not tensor.is_meta:
                self.tensors[name].copy_(tensor)
        self.names = FileNames() if names is None else names
        self.table = self.names.rows(own)
        self.stored = {name: self._view(kind, shape, at) for name, kind, shape, at in self.table}

    def piece(self, table: Sequence[Entry]) -> Tensor:
        """The bytes of some rows' weights, uint8, in their order: a view where they lie so."""
        begin, end = table[0][3], table[0][3]
        for name, _, _, offset in table:
            if offset != end:
                flat = [self.stored[entry[0]].reshape(-1).view(torch.uint8) for entry in table]
                return torch.cat(flat)
            end += self.stored[name].nbytes
        return self._bytes[begin:end]

    def _view(self, kind: str, shape: tuple[int, ...], offset: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, kind)
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset : offset + size].view(dtype).view(shape)

    def _pin(self) -> None:
        """Keep the pages where they are, so that a GPU copies to them by itself."""
        driver, place = cuda_driver(), self._bytes.data_ptr()
        pin(driver, self._bytes)
        weakref.finalize(self._bytes.untyped_storage(), driver.cudaHostUnregister, place)
