"""Weights read in place from another process's memory on the same GPU, by CUDA IPC handles.

The receiver copies from the sender's live storage straight into its own: nothing is staged.
Handles are made anew for every run, since a sleeping model's storage is given back and taken
again. This file plans nothing, and no pass plans it yet: only a caller of `Resharder` names `ipc`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rlflow.contract.values import Box, Shard
from rlflow.engines.reshard.boxes import sizes
from rlflow.engines.reshard.ends import (
    Carried,
    Ends,
    Group,
    all_gather_values,
    dtype_name,
    dtype_of,
    own,
    view,
)
from rlflow.engines.reshard.slices import Move
from rlflow.errors import Finding, RunError

# What rebuilds a tensor in another process: a function and its arguments, both plain values.
Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]
GPU = "GPU "


@dataclass(frozen=True, slots=True)
class Lent:
    """A shard in a storage that is lent: how to see it there, in elements of its dtype."""

    storage: int
    dtype: str
    offset: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Loan:
    """All that one rank lends to another: storages, and the shards in them by name."""

    handles: tuple[Handle, ...]
    shards: dict[str, Lent]


class DeviceMemory:
    """Each rank reads what it lacks from the memory of the rank that holds it.

    Raises RunError (E543) on every rank where two ends are not on one GPU. Collective.
    """

    staged = 0

    def __init__(self, moves: Sequence[Move], ends: Ends, group: Group) -> None:
        gpus = all_gather_values(group, gpu_of(ends))
        for move in moves:
            if move.travels and not one_gpu(gpus[move.sender], gpus[move.receiver]):
                raise _apart(move, gpus)
        self.ends = ends
        self.group = group
        self.own = own(moves, ends.rank)
        mine = [move for move in moves if move.travels]
        self.taken = tuple(move for move in mine if move.receiver == ends.rank)
        self.given: dict[int, list[str]] = {}
        for move in mine:
            names = self.given.setdefault(move.receiver, []) if move.sender == ends.rank else None
            if names is not None and move.name not in names:
                names.append(move.name)

    def run(self) -> Carried:
        """Lend, read, and wait until all have read."""
        settle()
        loans = all_gather_values(
            self.group, {to: self.loan(names) for to, names in self.given.items()}
        )
        carried = Carried(copied=self.ends.copy_own(self.own))
        borrowed = {
            rank: borrow(loan[self.ends.rank])
            for rank, loan in enumerate(loans)
            if self.ends.rank in loan
        }
        for move in self.taken:
            self.ends.fill(move, view(borrowed[move.sender][move.name], move.box))
            carried.received += move.bytes
        settle()
        del borrowed
        all_gather_values(self.group, None)
        return carried

    def loan(self, names: Sequence[str]) -> Loan:
        """Handles of the storages that hold these shards. Each is to be opened exactly once."""
        storages: dict[int, int] = {}
        handles: list[Handle] = []
        shards: dict[str, Lent] = {}
        for name in names:
            shard = self.ends.source[name]
            tensor = shard.tensor.detach()
            at = storages.setdefault(tensor.untyped_storage().data_ptr(), len(handles))
            if at == len(handles):
                handles.append(lend(tensor))
            shards[name] = Lent(
                at,
                dtype_name(tensor.dtype),
                int(tensor.storage_offset()),
                tensor.stride(),
                tuple(shard.shape),
                shard.box,
            )
        return Loan(tuple(handles), shards)

    def close(self) -> None:
        """Nothing is kept."""


def gpu_of(ends: Ends) -> str:
    """Which device holds all shards of a rank; a GPU by its UUID, the same in every process."""
    shards = [shard for table in (ends.source, *ends.targets) for shard in table.values()]
    devices = {shard.tensor.device for shard in shards}
    return " and ".join(sorted(map(named, devices)))


def named(device: torch.device) -> str:
    """A device as other processes know it."""
    if device.type != "cuda":
        return device.type
    return f"{GPU}{torch.cuda.get_device_properties(device).uuid}"


def one_gpu(sender: str, receiver: str) -> bool:
    """Whether all shards of both ends are on the same GPU."""
    return sender == receiver and sender.startswith(GPU) and " and " not in sender


def _apart(move: Move, gpus: Sequence[str]) -> RunError:
    """The error for ends that are not on one GPU."""
    return RunError(
        Finding(
            code="E543",
            what=f"the transport `ipc` cannot bring {move.name!r} from rank {move.sender} to "
            f"rank {move.receiver}",
            got=f"{gpus[move.sender]} and {gpus[move.receiver]}",
            expected="all shards of both on one GPU",
            fix='transport="collective"',
        )
    )


def lend(tensor: Tensor) -> Handle:
    """A handle of the whole storage of a tensor, as flat uint8."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    handle: Handle = reduce_tensor(flat.set_(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
    return handle


def borrow(loan: Loan) -> dict[str, Shard]:
    """The shards of another process; their memory stays that process's."""
    storages = [rebuild(*arguments) for rebuild, arguments in loan.handles]
    found = {}
    for name, lent in loan.shards.items():
        flat = storages[lent.storage]
        dtype = dtype_of(lent.dtype)
        typed = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensor = typed.as_strided(sizes(lent.box), lent.stride, lent.offset)
        found[name] = Shard(shape=lent.shape, box=lent.box, tensor=tensor)
    return found


def settle() -> None:
    """Wait for the device, so that other processes see what was written."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
