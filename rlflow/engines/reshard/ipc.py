"""Memory that another process opens in place, told in plain values: no byte of it is sent.

Of a GPU these are CUDA IPC handles, with the GPU by its UUID, since processes number GPUs as they
see them; of a CPU names of shared memory, which travel the same way. torch counts on both sides:
whoever lends keeps the memory until it is done with, and whoever borrows opens a handle once. When
the borrowed tensor of a GPU goes, torch waits for the kernels that read it before it says so. This
file knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

# The kind of a device, and the arguments of what opens the memory: plain values.
Handle = tuple[str, tuple[Any, ...]]
# Where the device is among the arguments of `reductions.rebuild_cuda_tensor`.
DEVICE = 6
# Times that torch's manager of shared memory is asked before its silence is an error.
ASKED = 30


def lend(memory: Tensor, count: int) -> Handle:
    """A handle of the first `count` bytes of memory, flat uint8 that fills its storage.

    Each handle is to be opened exactly once.
    """
    if memory.device.type == "cuda":
        found: Any = reductions.reduce_tensor(memory[:count])  # type: ignore[no-untyped-call]
        arguments = list(found[1])
        arguments[DEVICE] = str(torch.cuda.get_device_properties(memory.device).uuid)
        return "cuda", tuple(arguments)
    storage: Any = memory.untyped_storage()
    manager, name, size = _answered(storage._share_filename_cpu_)
    storage._shared_incref()
    return "cpu", (manager, name, size, count)


def borrow(handle: Handle) -> Tensor:
    """The lent bytes, flat uint8; they stay the memory of who lent them."""
    kind, arguments = handle
    if kind == "cuda":
        told = list(arguments)
        told[DEVICE] = _number(told[DEVICE])
        opened: Tensor = reductions.rebuild_cuda_tensor(*told)  # type: ignore[no-untyped-call]
        return opened
    *where, count = arguments
    storage = _answered(lambda: reductions.rebuild_storage_filename(torch.UntypedStorage, *where))  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:count]


def _answered(share: Callable[[], Any]) -> Any:
    """What torch's manager of shared memory answers, asked again where it is late.

    Torch waits a second for it, which a machine with more processes than cores can take.
    """
    for _ in range(ASKED):
        try:
            return share()
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
    return share()


def _number(uuid: str) -> int:
    """The number of a GPU in this process."""
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise RuntimeError(f"this process does not see GPU {uuid}")
