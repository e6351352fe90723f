"""What ranks along `tp` give each other in a pass: sums, features, and tokens that they share out.

Of tokens every rank has as many: where they do not divide, the last ones have zeros. Tensors are
`[..., tokens, size]`, and all but the last two dimensions are 1. This file knows no layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.engines.hf.sharded.mesh import chunk

# Of tensors, not of lists of them: torch 2.13 has renamed both.
if hasattr(dist, "all_gather_single"):
    GATHER, SCATTER = dist.all_gather_single, dist.reduce_scatter_single
else:
    GATHER, SCATTER = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Copied(torch.autograd.Function):
    """The same values on every rank; the gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`x` itself."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add up the ranks' gradients."""
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """The sum of the ranks' values; every rank has its gradient already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Add up `x` over the ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient itself."""
        return grad, None


class Gathered(torch.autograd.Function):
    """The ranks' values side by side along the last dimension, `size` in all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        """`x [..., own part]`; ranks with a shorter part send it filled up."""
        ranks = dist.get_world_size(group)
        longest = chunk(size, ranks, 0)[1]
        ctx.own = chunk(size, ranks, dist.get_rank(group))
        filled = nn.functional.pad(x, (0, longest - x.shape[-1])).contiguous()
        parts = [torch.empty_like(filled) for _ in range(ranks)]
        dist.all_gather(parts, filled, group=group)
        return torch.cat(parts, -1)[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The part of the gradient that is this rank's."""
        start, stop = ctx.own
        return grad[..., start:stop].contiguous(), None, None


def gathered(own: Tensor, group: dist.ProcessGroup, total: int) -> Tensor:
    """All `total` tokens `[..., total, size]` of every rank's part `own [..., part, size]`."""
    rows = own.reshape(-1, own.shape[-1]).contiguous()
    ranks = dist.get_world_size(group)
    whole = rows.new_empty((ranks * len(rows), rows.shape[1]))
    GATHER(whole, rows, group=group)
    return whole[:total].view(*own.shape[:-2], total, own.shape[-1])


def evened(whole: Tensor, ranks: int) -> Tensor:
    """The tokens `[total, size]` with zeros after them, so that `ranks` have as many each."""
    rows = whole.reshape(-1, whole.shape[-1]).contiguous()
    missing = -len(rows) % ranks
    return nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def summed(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank's part `[..., part, size]` of the sum of all ranks' `whole [..., total, size]`."""
    ranks = dist.get_world_size(group)
    rows = evened(whole, ranks)
    own = rows.new_empty((len(rows) // ranks, rows.shape[1]))
    SCATTER(own, rows, group=group)
    return own.view(*whole.shape[:-2], *own.shape)


def own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A rank's part `[..., part, size]` of tokens that all have alike."""
    ranks = dist.get_world_size(group)
    own = evened(whole, ranks).chunk(ranks)[dist.get_rank(group)]
    return own.reshape(*whole.shape[:-2], *own.shape)


class IntoBlock(torch.autograd.Function):
    """All tokens, of which each rank computes a part of the features: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, total: int) -> Tensor:
        """Gather the ranks' parts."""
        ctx.group = group
        return gathered(own, group, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Add up the ranks' gradients, and keep a part."""
        return summed(grad, ctx.group), None, None


class OutOfBlock(torch.autograd.Function):
    """A rank's part of the sum of what the ranks have made of all tokens."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Add up over the ranks and share out."""
        ctx.group, ctx.total = group, whole.shape[-2]
        return summed(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gather the ranks' gradients."""
        return gathered(grad, ctx.group, ctx.total), None


class ToEveryRank(torch.autograd.Function):
    """All tokens, of which every rank computes the same, or has the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup, total: int) -> Tensor:
        """Gather the ranks' parts."""
        ctx.group = group
        return gathered(own, group, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Keep a part of the gradient."""
        return own_part(grad, ctx.group), None, None


class FromEveryRank(torch.autograd.Function):
    """A rank's part of tokens that all have alike; all have the gradients of all of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Take the part."""
        ctx.group, ctx.total = group, whole.shape[-2]
        return own_part(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gather the ranks' gradients."""
        return gathered(grad, ctx.group, ctx.total), None
