"""Weights in a memory file that this process has inherited.

This file knows no engine.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import Any

from .server import Entry

BUCKET_BYTES = 256 << 20
# Rows and columns of a block of a quantised weight that has one scale.
BLOCK = 128

# A weight, a dimension, and where in it a part of the weight begins and ends.
Piece = tuple[str, int, int, int]
# What a weight of the engine is made of: pieces, rows of zeros behind, and what is added to all.
Made = tuple[list[Piece], int, float]


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

    def joined(
        self, pieces: list[Piece], extra: int, added: float = 0.0, device: str = "cpu"
    ) -> Any:
        """Pieces of weights one after the other, and rows of zeros behind, on a device.

        With what is `added` to all. Of quantised weights what they stand for, in bfloat16.
        """
        import torch

        held = dict(self.tensors())
        cut = []
        for part, dim, start, stop in pieces:
            found, scales = held[part].to(device), held.get(f"{part}_scale_inv")
            if scales is not None:
                found = unscaled(found, scales.to(device))
            cut.append(found.narrow(dim, start, stop - start))
        whole = torch.cat(cut) + added if added else torch.cat(cut)
        return torch.cat([whole, whole.new_zeros(extra, *whole.shape[1:])])


def unscaled(values: Any, scales: Any) -> Any:
    """What quantised values stand for: each times the scale of its block, rounded to bfloat16."""
    rows, columns = values.shape
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (values.float() * wide[:rows, :columns]).bfloat16()
