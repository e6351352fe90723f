"""What ranks along `cp` send each other beside rings: heads for tokens, and predictions.

Ranks that have a part of the tokens each exchange it, before attention, for all tokens of a part of
the heads, and back after it (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509, section 3.1):
attention itself is that of one rank, with whatever layout, window, soft cap or sink there is.
Tensors are token-major. This file knows no layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.engines.hf.sharded.token_parts import GATHER


class ToHeads(torch.autograd.Function):
    """Own tokens `[tokens, ranks, size]`, by who has which heads, for all tokens of own heads.

    `[ranks * tokens, size]` in the order of the ranks; gradients go the way back.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """One all-to-all."""
        ctx.group = group
        return heads_for_tokens(own, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The other way."""
        return tokens_for_heads(grad, ctx.group), None


class ToTokens(torch.autograd.Function):
    """The inverse of `ToHeads`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        """One all-to-all."""
        ctx.group = group
        return tokens_for_heads(own, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The other way."""
        return heads_for_tokens(grad, ctx.group), None


def heads_for_tokens(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[tokens, ranks, size]` to `[ranks * tokens, size]`."""
    sent = own.transpose(0, 1).contiguous()
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent, group=group)
    return come.flatten(0, 1)


def tokens_for_heads(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[ranks * tokens, size]` to `[tokens, ranks, size]`."""
    ranks = dist.get_world_size(group)
    sent = own.reshape(ranks, -1, own.shape[-1]).contiguous()
    come = torch.empty_like(sent)
    dist.all_to_all_single(come, sent, group=group)
    return come.transpose(0, 1)


def shareable(x: Tensor, heads: int, ranks: int) -> Tensor:
    """Keys or values with heads that `ranks` can share out, of `heads` of queries.

    Fewer than there are ranks are repeated for those that have queries of the same one; of a number
    that goes with neither every query has its own.
    """
    count = x.shape[1]
    if count % ranks == 0:
        return x
    return x.repeat_interleave((heads if ranks % count else ranks) // count, 1)


def tokens_of_all(
    q: Tensor, k: Tensor, v: Tensor, total: int, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Own heads of all `total` tokens, of own tokens `[tokens, heads, size]` of all heads."""
    ranks = dist.get_world_size(group)
    k, v = (shareable(x, q.shape[1], ranks) for x in (k, v))
    parts = [x.reshape(len(x), ranks, -1) for x in (q, k, v)]
    sizes = [part.shape[-1] for part in parts]
    found: Tensor = ToHeads.apply(torch.cat(parts, -1), group)  # type: ignore[no-untyped-call]
    mine = torch.split(found[:total], sizes, -1)
    return tuple(part.view(total, -1, x.shape[-1]) for part, x in zip(mine, (q, k, v), strict=True))


def heads_of_own(made: Tensor, part: int, group: dist.ProcessGroup) -> Tensor:
    """All heads `[part, heads, size]` of own tokens, of own heads `[total, heads, size]`."""
    ranks = dist.get_world_size(group)
    rows = made.flatten(1)
    rows = nn.functional.pad(rows, (0, 0, 0, part * ranks - len(rows)))
    found: Tensor = ToTokens.apply(rows, group)  # type: ignore[no-untyped-call]
    return found.reshape(part, -1, made.shape[-1])


def gathered_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`own [rows, ...]` of every rank, each of as many, in their order."""
    whole = own.new_empty((dist.get_world_size(group) * len(own), *own.shape[1:]))
    GATHER(whole, own.contiguous(), group=group)
    return whole


class JoinedPredictions(torch.autograd.Function):
    """What all ranks predict, of the own predictions `[most, ...]` of each: the same on every rank.

    Every rank goes on to the same loss, so a rank's gradient is already that of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, joined: Tensor, mine: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """`joined` int64 is where each prediction is among all ranks', `mine` which are own."""
        ctx.save_for_backward(mine)
        ctx.most = len(own)
        return gathered_rows(own, group)[joined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Its part."""
        (mine,) = ctx.saved_tensors
        own = grad.new_zeros((ctx.most, *grad.shape[1:]))
        own[: len(mine)] = grad[mine]
        return own, None, None, None
