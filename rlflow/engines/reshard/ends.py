"""Both ends of a reshard in this process: its shards, described to others and cut into views.

Also the exchange of plain values between the ranks of a group. This file knows no transport
and plans nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.contract.values import Box, Shard
from rlflow.engines.reshard.boxes import Entry, sizes
from rlflow.engines.reshard.slices import Move
from rlflow.errors import Finding, RunError

Said = TypeVar("Said")

Group = dist.ProcessGroup | None


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def entries(shards: Mapping[str, Shard]) -> dict[str, Entry]:
    """The table of this process.

    Raises RunError (E541) where a tensor has not the sizes of its box.
    """
    for name, shard in shards.items():
        if tuple(shard.tensor.shape) != sizes(shard.box):
            what = f"the tensor of a shard of {name!r} has not the sizes of its box"
            got, expected = str(tuple(shard.tensor.shape)), str(sizes(shard.box))
            raise RunError(Finding(code="E541", what=what, got=got, expected=expected))
    return {
        name: (tuple(shard.shape), dtype_name(shard.tensor.dtype), tuple(shard.box))
        for name, shard in shards.items()
    }


def view(shard: Shard, box: Box) -> Tensor:
    """The elements of `box`, in whole coordinates and within the shard, of its live storage."""
    at = tuple(
        slice(start - low, stop - low)
        for (start, stop), (low, _) in zip(box, shard.box, strict=True)
    )
    return shard.tensor.detach()[at]


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat uint8."""
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class Carried:
    """What a run carried: bytes from other ranks, bytes within the process, rounds taken."""

    received: int = 0
    copied: int = 0
    buckets: int = 0


@dataclass(frozen=True, slots=True)
class Ends:
    """What one rank holds of the source, and its part of every target."""

    rank: int
    source: Mapping[str, Shard]
    targets: Sequence[Mapping[str, Shard]]

    def read(self, move: Move) -> Tensor:
        """The elements that a move takes from here, in the source's dtype."""
        return view(self.source[move.name], move.box)

    def written(self, move: Move) -> list[Tensor]:
        """Every place here that a move fills."""
        return [view(self.targets[place.index][move.name], move.box) for place in move.places]

    def fill(self, move: Move, values: Tensor) -> None:
        """Put the elements of a move into their places, converted to the dtype of each."""
        for place in self.written(move):
            place.copy_(values.view(place.shape))

    def require_awake(self) -> None:
        """Raise RunError (E506) where the memory of a shard was given back."""
        for table in (self.source, *self.targets):
            for name, shard in table.items():
                if shard.tensor.numel() and not shard.tensor.untyped_storage().nbytes():
                    what = f"the memory of {name!r} was given back: its model is asleep"
                    raise RunError(Finding(code="E506", what=what, fix="wake both ends first"))

    def copy_own(self, moves: Sequence[Move]) -> int:
        """Carry out the moves within this process; returns their bytes."""
        for move in moves:
            self.fill(move, self.read(move))
        return sum(move.bytes for move in moves)


def own(moves: Sequence[Move], rank: int) -> tuple[Move, ...]:
    """What a rank moves to itself."""
    return tuple(move for move in moves if move.sender == rank == move.receiver)


def rank_in(group: Group) -> int:
    """The rank of this process in the group; 0 where there is none."""
    return 0 if group is None else dist.get_rank(group)


def all_gather_values(group: Group, value: Said) -> list[Said]:
    """The plain values of all ranks, by rank; collective.

    Raises RunError (E544) where a rank is lost.
    """
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    with naming_lost_ranks("the tables of all ranks"):
        dist.all_gather_object(found, value, group=group)
    return found


@contextmanager
def naming_lost_ranks(waiting_for: str) -> Iterator[None]:
    """Turn what `torch.distributed` raises for a lost peer into RunError (E544)."""
    try:
        yield
    except RuntimeError as error:
        what = f"a rank was lost while this one waited for {waiting_for}"
        fix = "the error of that rank comes first; this one follows from it"
        raise RunError(Finding(code="E544", what=what, got=str(error), fix=fix)) from error


def home(shards: Mapping[str, Shard]) -> torch.device:
    """Where a rank's shards live; the host for a rank that has none."""
    return next((shard.tensor.device for shard in shards.values()), torch.device("cpu"))
