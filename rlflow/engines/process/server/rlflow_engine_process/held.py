"""Weights in a memory file that this process has inherited.

This file knows no engine.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import Any

from .server import Entry

BUCKET_BYTES = 512 << 20

# A weight, a dimension, and where in it a part of the weight begins and ends.
Piece = tuple[str, int, int, int]


class HeldWeights:
    """The weights of a `table`, whose bytes lie in the memory of a descriptor."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.table: list[Entry] = said["table"]
        self.descriptor, self.bytes = int(said["memory"]), int(said["bytes"])
        self.memory = mmap.mmap(self.descriptor, self.bytes)

    def tensors(self, table: list[Entry] | None = None) -> Iterator[tuple[str, Any]]:
        """Every weight by its name, a view of the memory; those of a part of the table."""
        import torch

        for name, dtype, shape, offset in self.table if table is None else table:
            kind, count = getattr(torch, dtype), math.prod(shape)
            flat = torch.frombuffer(self.memory, dtype=kind, count=count, offset=offset)
            yield name, flat.view(shape)

    def buckets(self) -> list[list[Entry]]:
        """The table in parts whose weights have about so many bytes, and one at the least."""
        found: list[list[Entry]] = [[]]
        begin = 0
        for entry in self.table:
            if found[-1] and entry[3] - begin > BUCKET_BYTES:
                found.append([])
                begin = entry[3]
            found[-1].append(entry)
        return found

    def joined(self, pieces: list[Piece], extra: int, device: str = "cpu") -> Any:
        """Pieces of weights one after the other, and rows of zeros behind, on a device."""
        import torch

        held = dict(self.tensors())
        cut = [held[part].narrow(dim, start, stop - start) for part, dim, start, stop in pieces]
        whole = torch.cat([piece.to(device) for piece in cut])
        return torch.cat([whole, whole.new_zeros(extra, *whole.shape[1:])])
