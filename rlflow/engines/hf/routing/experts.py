"""A rank's experts: what they make of the tokens that chose them, wherever those lie.

Tokens are sorted by expert, so that each expert's are one matrix and all of them one grouped
product (Gale et al., "MegaBlocks", arXiv:2211.15841, section 4). Tokens that ranks see alike are
picked where the experts are; those of other ranks come by an all-to-all and go back by another
(Lepikhin et al., "GShard", arXiv:2006.16668, section 3.2), as many as there are: none is dropped.
This file knows no router: which experts a token has chosen, and their weights, are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What torch has a grouped product for.
GROUPED = {torch.float32, torch.bfloat16, torch.float16}
# What may take the gradient of runs and those runs, of which a weight's gradient is made.
LateRuns = Callable[[Tensor, Tensor, Tensor], bool]


def own_experts(
    layer: Any, first: int, x: Tensor, chosen: Tensor, weights: Tensor, count: int | None = None
) -> Tensor:
    """What a layer's experts add to tokens `x [tokens, size]` that chose them, of its dtype.

    `chosen` int64 and `weights`, `[tokens, k]`, number the experts of all ranks; the layer has
    those from `first` on, stacked: gate and up `[experts, 2 width, size]`, down
    `[experts, size, width]`. A token that chose none of them has zeros. The host waits for the
    `count` of pairs of a token and one of these experts, unless it is known.
    """
    order, sizes = sorted_pairs(chosen, first, len(layer.gate_up_proj))
    pairs = order[: pairs_here(layer, chosen, sizes) if count is None else count]
    return of_pairs(layer, x, pairs, sizes, weights)


def all_experts(layer: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same of a layer that has all experts; the host waits for nothing."""
    return of_pairs(layer, x, *sorted_pairs(chosen, 0, len(layer.gate_up_proj)), weights)


def of_pairs(layer: Any, x: Tensor, pairs: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
    """What experts add to tokens `x`, of `pairs` sorted by expert, so many `sizes` of each."""
    made = expert_products(layer, x[pairs // weights.shape[1]], sizes)
    added: Tensor = AddedUp.apply(made, weights, pairs)  # type: ignore[no-untyped-call]
    return added


class AddedUp(torch.autograd.Function):
    """What experts made of pairs, by weight, added up for each token.

    Keeps what they made for its backward, and not its products with weights beside it, as torch's
    `index_add` would: of a token that chose k experts k hidden states.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
        """Rows `made [pairs, size]` by their `weights [tokens, k]`: `[tokens, size]`."""
        ctx.save_for_backward(made, weights, pairs)
        added = (made * weights.flatten()[pairs, None]).to(made.dtype)
        total = made.new_zeros(len(weights), made.shape[1])
        return total.index_add_(0, pairs // weights.shape[1], added)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of a row the token's gradient by its weight; of a weight both, multiplied and added."""
        made, weights, pairs = ctx.saved_tensors
        own, tokens = weights.flatten()[pairs], pairs // weights.shape[1]
        of_token = grad[tokens]
        to_weights = torch.zeros_like(weights).flatten()
        to_weights[pairs] = (of_token * made.to(weights.dtype)).sum(-1).to(weights.dtype)
        return (of_token * own[:, None]).to(made.dtype), to_weights.view_as(weights), None


def sorted_pairs(chosen: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Pairs of a token and an expert, by the expert: those of `count` from `first` on come first.

    The places of the pairs in `chosen [tokens, k]`, int64 `[tokens k]`, and how many there are of
    each of those experts, int64 `[count]`. Of one expert they are in the order of the tokens. The
    host waits for nothing.
    """
    expert = chosen.flatten() - first
    expert = torch.where((expert >= 0) & (expert < count), expert, count)
    sizes = expert.new_zeros(count + 1).scatter_add_(0, expert, torch.ones_like(expert))
    return torch.sort(expert, stable=True).indices, sizes[:count]


def pairs_here(layer: Any, chosen: Tensor, sizes: Tensor) -> int:
    """How many of the pairs `chosen [tokens, k]` are of a layer's experts; the host waits."""
    return int(sizes.sum())


def rows_of_ranks(
    layer: Any, chosen: Tensor, going: Tensor, coming: Tensor
) -> tuple[list[int], list[int], int]:
    """How many tokens go to each rank and come from it, and how many pairs these are of here.

    Tokens and pairs of each rank, `[ranks, 2]`; the host waits once.
    """
    sent, received = torch.stack([going, coming]).tolist()
    rows = ([count for count, _ in ends] for ends in (sent, received))
    return *rows, sum(pairs for _, pairs in received)


def expert_products(layer: Any, rows: Tensor, sizes: Tensor) -> Tensor:
    """Runs of `rows [rows, size]`, of int64 lengths `sizes [experts]`, each by its expert.

    A layer may have what is `late` for its stacks, by their names.
    """
    late: dict[str, LateRuns] = getattr(layer, "late", {})

    def product(rows: Tensor, stack: str) -> Tensor:
        weight: Tensor = getattr(layer, stack)
        if stack not in late or not torch.is_grad_enabled():
            return grouped_product(rows, weight, sizes)
        held = weight.detach()
        made: Tensor = SplitProduct.apply(rows, held, sizes, late[stack], weight)  # type: ignore[no-untyped-call]
        return made

    gate, up = product(rows, "gate_up_proj").chunk(2, -1)
    return product(layer.act_fn(gate) * up, "down_proj")


class SplitProduct(torch.autograd.Function):
    """A `grouped_product`, of which the gradient of the weight may be left for later."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, held: Tensor, sizes: Tensor, late: LateRuns, weight: Tensor
    ) -> Tensor:
        """As `grouped_product` has it, of the `weight` that is `held` without gradient."""
        ctx.late = late
        ctx.save_for_backward(rows, held, sizes)
        return grouped_product(rows, held, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the rows at once; of the weight unless that is left."""
        rows, held, sizes = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = grouped_product(grad, held.transpose(1, 2), sizes)
        left = ctx.late(grad, rows, sizes)
        return of_rows, None, None, None, None if left else grouped_outer(grad, rows, sizes)


def grouped_product(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """Runs of `rows [rows, in]`, each by the transpose of its `weight [runs, out, in]`.

    `sizes` int64 `[runs]` are their lengths, which may be 0.
    """
    if not has_grouped(rows):
        parts = zip(torch.split(rows, sizes.tolist()), weight.unbind(), strict=True)
        return torch.cat([part @ one.T for part, one in parts])
    return grouped_mm(rows, weight.transpose(1, 2), sizes)


def grouped_outer(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    """`left.T @ right` of each run of `left [rows, out]` and `right [rows, in]`, of such lengths.

    `[runs, out, in]`, zeros of a run without rows: the gradient of a `grouped_product`'s weight.
    """
    if not has_grouped(left):
        parts = zip(*(torch.split(each, sizes.tolist()) for each in (left, right)), strict=True)
        return torch.stack([one.T @ other for one, other in parts])
    return grouped_mm(left.T, right, sizes)


def has_grouped(rows: Tensor) -> bool:
    """Whether torch has one product for all runs of rows; on a CPU it would loop as well."""
    known = hasattr(torch.nn.functional, "grouped_mm") and rows.dtype in GROUPED
    return known and rows.device.type != "cpu" and len(rows) > 0


def grouped_mm(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    """The grouped product of torch, of runs of so many rows, or of as many columns and rows."""
    made: Tensor = torch.nn.functional.grouped_mm(left, right, offs=sizes.cumsum(0).to(torch.int32))
    return made


class Sent(torch.autograd.Function):
    """Tokens for other ranks in the place of theirs for this one; gradients go the way back.

    Each with the experts that it chose and their weights, in one message.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        chosen: Tensor,
        group: dist.ProcessGroup,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`rows [sum of sent, size]`, `weights` and `chosen`, `[sum of sent, k]`, by their rank."""
        ctx.way = group, sent, received
        own = (rows, weights, chosen)
        come = all_to_all(in_bytes(own), group, sent, received)
        found, got, picked = out_of_bytes(come, own)
        ctx.mark_non_differentiable(picked)
        return found, got, picked

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, to_weights: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        """The gradients of this rank's rows and weights, which come from where those went."""
        group, sent, received = ctx.way
        own = (grad, to_weights)
        come = all_to_all(in_bytes(own), group, received, sent)
        of_rows, of_weights = out_of_bytes(come, own)
        return of_rows, of_weights, None, None, None, None


class Returned(torch.autograd.Function):
    """What ranks have made of rows, where those came from; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        made: Tensor,
        group: dist.ProcessGroup,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Tensor:
        """`made [sum of sent, size]` by the rank that it goes to; `[sum of received, size]`."""
        ctx.way = group, sent, received
        return all_to_all(made, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradients of what this rank has made."""
        group, sent, received = ctx.way
        return all_to_all(grad, group, received, sent), None, None, None


class SummedOfRanks(torch.autograd.Function):
    """What ranks have made of a token, added up in the order of its choices, in float32 at least.

    Keeps none of it, as the rows that torch's `index_add` keeps would be.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, pairs: Tensor, shape: torch.Size, k: int) -> Tensor:
        """Rows `made [pairs, size]`, of `pairs` among the `k` of each token: of that `shape`."""
        ctx.tokens = pairs // k
        each = made.new_zeros(shape[0] * k, shape[1])
        each[pairs] = made
        wide = torch.promote_types(made.dtype, torch.float32)
        return each.view(shape[0], k, shape[1]).sum(1, dtype=wide).to(made.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Of a row the gradient of its token."""
        return grad[ctx.tokens], None, None, None


def in_bytes(columns: Sequence[Tensor]) -> Tensor:
    """Tensors of as many rows side by side, uint8 `[rows, bytes]`."""
    return torch.cat([each.contiguous().view(torch.uint8) for each in columns], 1)


def out_of_bytes(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of which rows are the bytes, of the widths and dtypes of others."""
    widths = [each.shape[1] * each.element_size() for each in like]
    parts = zip(torch.split(rows, widths, 1), like, strict=True)
    return [part.contiguous().view(each.dtype) for part, each in parts]


def all_to_all(
    rows: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """One all-to-all of rows, so many sent to and received from each rank of the group."""
    come = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(come, rows.contiguous(), list(received), list(sent), group=group)
    return come


def dispatched_experts(
    layer: Any, first: int, group: dist.ProcessGroup, x: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """What the experts of a group's ranks add to this rank's tokens `x [tokens, size]`.

    Each rank has as many experts in `layer` as every other, stacked as of `own_experts`; the
    group's are those from `first` on, in the order of its ranks. `chosen` int64 and `weights` are
    `[tokens, k]`. A token goes once to each rank that has any of its experts, and what these add
    to it comes back as one row; see `SummedOfRanks`. All ranks of the group take part, also those
    without a token.

    How many tokens and pairs go to each rank is exchanged first. The sizes of the all-to-all that
    follows have to be on the host (NCCL has no other), so that each call waits for the device once;
    the backward does not.
    """
    ranks, count, k = dist.get_world_size(group), len(layer.gate_up_proj), chosen.shape[1]
    owner = torch.div(chosen - first, count, rounding_mode="floor")
    owner = torch.where((owner >= 0) & (owner < ranks), owner, ranks)
    # Of the pairs of a token and a rank the first stands for all.
    first_of = (owner[:, :, None] == owner[:, None, :]).tril(-1).any(-1).logical_not()
    counted = torch.stack([first_of, torch.ones_like(first_of)], -1).long().view(-1, 2)
    going = counted.new_zeros(ranks + 1, 2).index_add_(0, owner.flatten(), counted)[:ranks]
    order = torch.sort(torch.where(first_of, owner, ranks).flatten(), stable=True).indices
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going, group=group)
    sent, received, here = rows_of_ranks(layer, chosen, going, coming)
    pairs = order[: sum(sent)]
    leave = pairs // k
    told = (chosen[leave] - first).to(torch.int32)
    way = group, sent, received
    came, weighed, picked = Sent.apply(x[leave], weights[leave], told, *way)  # type: ignore[no-untyped-call]
    own = dist.get_rank(group) * count
    made = own_experts(layer, own, came, picked.long(), weighed, here)
    returned: Tensor = Returned.apply(made, group, received, sent)  # type: ignore[no-untyped-call]
    added: Tensor = SummedOfRanks.apply(returned, pairs, x.shape, k)  # type: ignore[no-untyped-call]
    return added
