"""The ranks that hold one model together, and what they agree on.

A mesh has the axes `replicate`, `pp`, `fsdp` and `tp`: ranks along `tp` share every layer and see
the same rows, and along `pp` they see the same rows and have different layers; along the other two
they see different rows, and along `fsdp` share the parameters.
With expert parallelism the same ranks are a second mesh, whose `fsdp` is cut in two: neighbours
along `ep` have different experts, and along `shard` ranks share the same ones. With context
parallelism they are another, whose `fsdp` is cut in two as well: neighbours along `cp` have parts
of the same rows, and along `rows` ranks see different ones.
Every method that communicates is called by all ranks of the mesh, in the same order. This file
knows neither models nor batches.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")

Axis = Literal["replicate", "pp", "fsdp", "rows", "cp", "tp"]

AXES: tuple[Axis, ...] = ("replicate", "pp", "fsdp", "tp")
CONTEXT_AXES: tuple[Axis, ...] = ("replicate", "pp", "rows", "cp", "tp")
# Ranks along these see different rows.
ROWS: tuple[Axis, ...] = ("replicate", "rows")
# How descriptions of process groups begin in which two ranks talk alone, as reshards and stages do.
PAIRS = "pairs of "
EXPERT_AXES = ("replicate", "pp", "shard", "ep", "tp")


class MeshRanks:
    """A rank among those of `mesh`, of axes AXES; what is communicated lies on `device`.

    `experts` has the same ranks with axes EXPERT_AXES, where experts are apart, and `context` with
    axes CONTEXT_AXES, where tokens of a row are.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        experts: DeviceMesh | None = None,
        context: DeviceMesh | None = None,
    ) -> None:
        assert mesh.mesh_dim_names == AXES, mesh
        assert experts is None or experts.mesh_dim_names == EXPERT_AXES, experts
        assert context is None or context.mesh_dim_names == CONTEXT_AXES, context
        self.mesh = mesh
        self.experts = experts
        self.context = context
        self.ep = 1 if experts is None else experts["ep"].size()
        self.device = device
        self.sizes: dict[Axis, int] = {axis: mesh[axis].size() for axis in AXES}
        self.sizes |= {"rows": self.sizes["fsdp"], "cp": 1}
        of: dict[Axis, DeviceMesh] = dict.fromkeys(AXES, mesh)
        if context is not None:
            of |= {"rows": context, "cp": context}
            self.sizes |= {"rows": context["rows"].size(), "cp": context["cp"].size()}
        self.groups = {axis: on.get_group(axis) for axis, on in of.items() if self.sizes[axis] > 1}
        if context is None and "fsdp" in self.groups:
            self.groups["rows"] = self.groups["fsdp"]

    def place(self, axis: Axis) -> int:
        """The number of this rank along an axis."""
        return self.groups[axis].rank() if axis in self.groups else 0

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks along `ep`, whose experts are all of a `tp` rank's."""
        assert self.experts is not None
        return self.experts.get_group("ep")

    @property
    def expert_place(self) -> int:
        """The number of this rank along `ep`."""
        assert self.experts is not None
        return int(self.experts.get_local_rank("ep"))

    def total(self, values: Tensor, axes: Collection[Axis]) -> Tensor:
        """Add up elementwise along `axes`, in place."""
        for axis in axes:
            if axis in self.groups:
                dist.all_reduce(values, group=self.groups[axis])
        return values

    def most(self, value: int, axes: Collection[Axis] = AXES) -> int:
        """The largest of everybody's values."""
        largest = torch.tensor(value, device=self.device)
        for axis in axes:
            if axis in self.groups:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.groups[axis])
        return int(largest)

    def gather(self, value: Value, axes: Collection[Axis] = ROWS) -> list[Value]:
        """Everybody's values, in an order that is the same for all."""
        found = [value]
        for axis in axes:
            if axis in self.groups:
                parts: list[Any] = [None] * self.sizes[axis]
                dist.all_gather_object(parts, found, group=self.groups[axis])
                found = [item for part in parts for item in part]
        return found

    def first_says(self, values: Tensor, axis: Axis) -> Tensor:
        """Replace `values` by those of the first rank along an axis, in place."""
        if axis in self.groups:
            dist.broadcast(values, group=self.groups[axis], group_src=0)
        return values


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """Start and stop of one of `parts` chunks of `size` things, the last ones shorter or empty.

    All but the last chunk that is not empty have ceil(size / parts), as `torch.chunk` has.
    """
    step = -(-size // parts)
    start = min(part * step, size)
    return start, min(start + step, size)
