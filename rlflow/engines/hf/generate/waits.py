"""Operations for which a host waits for its device, counted on any device.

Reading a number, choosing by a mask and cutting by one need what the device has not computed yet.
They are known by their names, so a CPU counts what an accelerator would wait for. This file knows
neither models nor what is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The size of the result, or the result on the host, depends on values.
WAITING = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
BY_MASK = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and those that wait, while it is entered.

    `largest` has the numbers of the largest tensor made, by dtype.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.waits: dict[str, int] = {}
        self.largest: Counter[torch.dtype] = Counter()

    @property
    def count(self) -> int:
        """How often the host would have waited."""
        return sum(self.waits.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the operation and do it."""
        named = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in WAITING or masks(name, args) or sized_by_values(name, args, named):
            self.waits[name] = self.waits.get(name, 0) + 1
        result = func(*args, **named)
        self.operations += not (func.is_view and same_storage(args, result))
        if isinstance(result, Tensor):
            self.largest[result.dtype] = max(self.largest[result.dtype], result.numel())
        if crosses(args, result):
            self.waits[name] = self.waits.get(name, 0) + 1
        return result


def masks(name: str, args: Sequence[Any]) -> bool:
    """Whether an index is a mask, of which the places have to be known."""
    if name not in BY_MASK:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def sized_by_values(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether rows are repeated by numbers on the device, and nobody said how many come of it."""
    counts = args[-1] if args else None
    return (
        name == "repeat_interleave"
        and isinstance(counts, Tensor)
        and named.get("output_size") is None
    )


def crosses(args: Sequence[Any], result: Any) -> bool:
    """Whether a tensor went from the host to a device or back by this, and was waited for.

    A copy from or into pinned memory need not be. Numbers of no dimension go along with a kernel.
    """
    if not isinstance(result, Tensor):
        return False
    given = [arg for arg in args if isinstance(arg, Tensor) and arg.dim()]
    there = {in_host_memory(each) for each in (*given, result)}
    pinned = any(in_host_memory(each) and each.is_pinned() for each in (*given, result))
    return len(there) > 1 and not pinned


def same_storage(args: Sequence[Any], result: Any) -> bool:
    """Whether nothing was computed: a tensor is the first argument, seen another way."""
    if not (args and isinstance(args[0], Tensor) and isinstance(result, Tensor)):
        return True
    return bool(args[0].untyped_storage()._cdata == result.untyped_storage()._cdata)


def in_host_memory(x: Tensor) -> bool:
    """Whether a tensor lies in host memory."""
    return x.device.type == "cpu"
