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


class Held:
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
