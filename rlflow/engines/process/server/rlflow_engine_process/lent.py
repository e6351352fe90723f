"""Memory of another process, borrowed in place by a handle, and the weights that lie in it.

This file knows no engine.
"""

from __future__ import annotations

import math
from typing import Any

from .server import Entry

# Where the device is among the arguments of `reductions.rebuild_cuda_tensor`.
DEVICE = 6


def borrowed(kind: str, arguments: tuple[Any, ...]) -> Any:
    """The bytes that a handle tells of, flat uint8; they stay the memory of who lends them.

    Of a GPU it tells the GPU by its UUID, which has another number in each process.
    """
    import torch
    from torch.multiprocessing import reductions

    rebuild: Any = reductions
    if kind == "cuda":
        told = list(arguments)
        told[DEVICE] = _number(told[DEVICE])
        return rebuild.rebuild_cuda_tensor(*told)
    *where, count = arguments
    storage = rebuild.rebuild_storage_filename(torch.UntypedStorage, *where)
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:count]


def weights_in(memory: Any, bucket: list[Entry]) -> list[tuple[str, Any]]:
    """The weights of a bucket by their names, views of its memory."""
    import torch

    made = []
    for name, dtype, shape, begin in bucket:
        kind = getattr(torch, dtype)
        end = begin + math.prod(shape) * kind.itemsize
        made.append((name, memory[begin:end].view(kind).view(tuple(shape))))
    return made


def _number(uuid: str) -> int:
    """The number of a GPU in this process."""
    import torch

    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise RuntimeError(f"this process does not see GPU {uuid}")
