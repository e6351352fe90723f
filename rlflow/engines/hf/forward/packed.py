"""Rows of prompt and response as one flat sequence of tokens, without padding.

Rows with equal prompts share one copy of it: a prompt's tokens stand first, the responses to
it follow. Responses that begin alike share their beginning where a whole group fits one square of
attention, as branches of a tree. The last token of a response predicts nothing and is left out.
The layout says where each row lies and who may attend to whom, as blocks that attention computes
one by one. This file knows neither models nor losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import flat, lengths, offsets, prompt_groups, to_device
from rlflow.engines.hf.forward.prefixes import (
    Index,
    Prefixes,
    empty_prompt,
    prefixes,
    unshared_rows,
)
from rlflow.engines.hf.forward.spans import Spans, spans
from rlflow.errors import RunError

# Ragged batches are filled up to a multiple of this many tokens, for matrix libraries make code
# for every shape they meet, which costs more than the tokens do.
MULTIPLE = 32
# Up to this many tokens a prompt and all its responses attend as one masked square.
TREE_WIDTH = 192
# Matrix libraries add fewer numbers than this in another order. A square is no narrower, so that
# a group's numbers depend neither on how wide the others are nor on what its rows share.
LEAST_WIDTH = 16
# A bucket of rows holds responses down to this part of its longest one.
BUCKET = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A padded rectangle of attention: `[size, q_len]` queries on `[size, kv_len]` keys.

    `q_index` and `kv_index` name the flat token in every place (int64, flattened), None where
    the flat tokens already are the rectangle; padded places name token 0. `mask` is bool
    `[size, q_len, kv_len]`, true where a query sees a key; a padded query sees at least one. What
    is true in `together` no window hides.
    """

    size: int
    q_len: int
    kv_len: int
    q_index: Tensor | None
    kv_index: Tensor | None
    mask: Tensor
    q_positions: Tensor
    kv_positions: Tensor
    together: Tensor | None = None

    @property
    def square(self) -> bool:
        """Whether queries and keys are the same tokens in the same places."""
        return self.q_index is self.kv_index


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where tokens lie in the flat sequence; index tensors int64 on the model's device.

    The first `real` tokens are the rows'; a few more may fill up the shape, seen by nobody.
    `slots[t]` is the place of flat token t in the blocks' places joined end to end, None where
    the one block is the flat sequence itself. `targets` has, for each of `predictions` response
    tokens in the batch's order, the flat position that predicts it, and is filled up likewise.
    `longest` is the longest row's length. With `spans` there are no blocks; prompts stand first.
    `rows` is the order itself, and `predictors` are the targets, on the host.
    """

    tokens: Tensor
    positions: Tensor
    blocks: tuple[Block, ...]
    slots: Tensor | None
    targets: Tensor
    real: int
    predictions: int
    longest: int
    spans: Spans | None = None
    rows: FlatOrder | None = None
    predictors: Index | None = None

    @property
    def of_all(self) -> PackedLayout:
        """The layout of all tokens of the rows."""
        return self

    def taken(self, values: Tensor, nothing: float) -> Tensor:
        """What this layout's tokens have of values of all; `nothing` where they only fill up."""
        return values

    def predicted(self, values: Tensor) -> Tensor:
        """The same of values of all predictions."""
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOrder:
    """The flat order, as arrays: prompts `[groups]`, rows that have inputs `[rows]`.

    Rows are sorted by group. `row_start` and `row_length` are those of a row's own tokens, which
    follow the `row_shared` first ones that stand in the rows before it. `path` is the flat token
    of every input of every row, joined end to end. `source` is the index of each flat token in
    prompts' values followed by responses' values.
    """

    group_start: Index
    group_length: Index
    prompt_length: Index
    row_group: Index
    row_start: Index
    row_length: Index
    row_shared: Index
    path: Index
    source: Index
    positions: Index


def pack(
    prompt_tokens: Tensor,
    response_tokens: Tensor,
    device: torch.device,
    tree_width: int = TREE_WIDTH,
    *,
    pixels: Tensor | None = None,
    dense: bool | None = None,
) -> PackedLayout:
    """Lay out ragged int64 prompts and responses `[rows, j]`; prompts of equal `pixels` are shared.

    A prompt whose responses are all empty is left out. A `dense` layout, the default on a CPU, has
    blocks with masks, in which groups of up to `tree_width` tokens attend as one square; another
    has spans. Raises RunError for an empty prompt.
    """
    dense = device.type == "cpu" if dense is None else dense
    sizes = lengths(prompt_tokens).cpu().numpy()
    responses = lengths(response_tokens).cpu().numpy()
    if len(sizes) and not sizes.min():
        raise RunError(empty_prompt(int(sizes.argmin())))
    used = np.flatnonzero(responses)
    alike = prompt_groups(prompt_tokens, pixels)[used]
    first, group = np.unique(alike, return_inverse=True)
    inputs, values = responses[used] - 1, flat(response_tokens).cpu().numpy()
    starts = (np.cumsum(responses) - responses)[used]
    width = sizes[first] + np.bincount(group, inputs, len(first)).astype(np.int64)
    tree = dense and width.max(initial=0) <= tree_width
    shared = prefixes(group, inputs, starts, values) if tree else unshared_rows(group)
    rows = flat_order(
        offsets(prompt_tokens).cpu().numpy()[first],
        sizes[first],
        starts + len(flat(prompt_tokens)),
        inputs,
        group,
        shared,
        prompts_first=not dense,
    )
    source = torch.cat([flat(prompt_tokens), flat(response_tokens)])
    predictors = targets(rows, shared.order, responses[used])
    return lay_out(rows, source, predictors, device, tree_width if dense else None)


def pack_prompts(
    prompt_tokens: Tensor, device: torch.device, *, dense: bool | None = None
) -> PackedLayout:
    """Lay out prompts alone, each by itself; `targets` is the last token of each."""
    dense = device.type == "cpu" if dense is None else dense
    sizes = lengths(prompt_tokens).cpu().numpy()
    if len(sizes) and not sizes.min():
        raise RunError(empty_prompt(int(sizes.argmin())))
    none, starts = np.empty(0, dtype=np.int64), offsets(prompt_tokens).cpu().numpy()[:-1]
    rows = flat_order(starts, sizes, none, none, none, unshared_rows(none))
    last, width = rows.group_start + sizes - 1, TREE_WIDTH if dense else None
    return lay_out(rows, flat(prompt_tokens), last, device, width)


def flat_order(
    prompt_source: Index,
    prompt_length: Index,
    row_source: Index,
    row_length: Index,
    row_group: Index,
    prefixes: Prefixes,
    *,
    prompts_first: bool = False,
) -> FlatOrder:
    """Put every prompt before its rows' own tokens; find each flat token's source.

    Or all prompts before all rows, those first that have a row with tokens of its own.
    """
    groups, rows = len(prompt_length), len(row_length)
    by, shared = prefixes.order, prefixes.shared
    row_group, whole = row_group[by], row_length[by]
    group = np.concatenate([np.arange(groups), row_group])
    added = np.bincount(row_group, whole - shared, groups).astype(np.int64)
    by_group = np.argsort(group, kind="stable")
    if prompts_first:
        used_first = np.argsort(added == 0, kind="stable")
        by_group = np.concatenate([used_first, np.arange(groups, groups + rows)])
    length = np.concatenate([prompt_length, whole - shared])[by_group]
    start = np.cumsum(length) - length
    source = np.concatenate([prompt_source, row_source[by] + shared])[by_group]
    before = np.zeros(groups, dtype=np.int64)
    offset = np.concatenate([before, prompt_length[row_group] + shared])[by_group]
    within = np.arange(int(length.sum())) - np.repeat(start, length)
    place = np.empty(groups + rows, dtype=np.int64)
    place[by_group] = start
    return FlatOrder(
        group_start=place[:groups],
        group_length=prompt_length + added,
        prompt_length=prompt_length,
        row_group=row_group,
        row_start=place[groups:],
        row_length=whole - shared,
        row_shared=shared,
        path=prefixes.path(place[groups:], whole),
        source=np.repeat(source, length) + within,
        positions=np.repeat(offset, length) + within,
    )


def targets(rows: FlatOrder, order: Index, responses: Index) -> Index:
    """For each response token, in the batch's order, the flat token that predicts it.

    `order` names the rows of the batch, of `responses` tokens each, in flat order.
    """
    result = np.empty(int(responses.sum()), dtype=np.int64)
    starts, size = (np.cumsum(responses) - responses)[order], responses[order]
    result[starts] = (rows.group_start + rows.prompt_length - 1)[rows.row_group]
    inputs = size - 1
    within = np.arange(len(rows.path)) - np.repeat(np.cumsum(inputs) - inputs, inputs)
    result[np.repeat(starts, inputs) + within + 1] = rows.path
    return result


def lay_out(
    rows: FlatOrder, source: Tensor, predictors: Index, device: torch.device, tree_width: int | None
) -> PackedLayout:
    """Choose the blocks, or spans without a width, and move everything to the device."""
    width = int(rows.group_length.max(initial=0))
    blocks, slots = list[Block](), None
    if tree_width is not None:
        blocks, slots = tree_block(rows, width) if width <= tree_width else row_blocks(rows)
    return PackedLayout(
        tokens=to_device(source[fill_up(rows.source, slots)], device),
        positions=to_device(fill_up(rows.positions, slots), device),
        blocks=tuple(on_device(block, device) for block in blocks),
        slots=None if slots is None else to_device(fill_up(slots, slots), device),
        targets=to_device(fill_up(predictors, slots), device),
        real=len(rows.source),
        predictions=len(predictors),
        longest=int(rows.positions.max(initial=-1)) + 1,
        spans=None if tree_width is not None else spans(rows, device),
        rows=rows,
        predictors=predictors,
    )


def fill_up(index: Index, slots: Index | None) -> Tensor:
    """An index with zeros up to a multiple of MULTIPLE, unless the layout is regular."""
    missing = 0 if slots is None else -len(index) % MULTIPLE
    return torch.from_numpy(np.pad(index, (0, missing)))


def on_device(block: Block, device: torch.device) -> Block:
    """The same block with its tensors on a device; shared indices stay shared."""
    q_index = None if block.q_index is None else block.q_index.to(device)
    kv_index = None if block.kv_index is None else block.kv_index.to(device)
    return replace(
        block,
        q_index=q_index,
        kv_index=q_index if block.square else kv_index,
        mask=block.mask.to(device),
        q_positions=block.q_positions.to(device),
        kv_positions=block.kv_positions.to(device),
    )


def tree_block(rows: FlatOrder, width: int) -> tuple[list[Block], Index | None]:
    """One square per group: its prompt, then its rows, a token seeing those that lead to it."""
    groups, total = len(rows.group_length), len(rows.source)
    width = max(width, LEAST_WIDTH)
    dense = groups * width == total
    group = np.repeat(np.arange(groups), rows.group_length)
    place = np.arange(total) - rows.group_start[group]
    slots = place + group * width
    column = np.arange(width)
    sees = np.tril(
        np.broadcast_to(column < rows.prompt_length[:, None, None], (groups, width, width))
    )
    sees |= np.eye(width, dtype=np.bool_)
    query, key = ancestors(rows)
    sees[group[query], place[query], place[key]] = True
    positions = np.zeros(groups * width, dtype=np.int64)
    positions[slots] = rows.positions
    index = None
    if not dense:
        names = np.zeros(groups * width, dtype=np.int64)
        names[slots] = np.arange(total)
        index = torch.from_numpy(names)
    depth = torch.from_numpy(positions.reshape(groups, width))
    block = Block(
        size=groups,
        q_len=width,
        kv_len=width,
        q_index=index,
        kv_index=index,
        mask=torch.from_numpy(sees),
        q_positions=depth,
        kv_positions=depth,
    )
    return [block], None if dense else slots


def ancestors(rows: FlatOrder) -> tuple[Index, Index]:
    """Pairs of flat tokens of one row, the later one and each that it comes after."""
    whole = rows.row_length + rows.row_shared
    longest = int(whole.max(initial=0))
    column = np.arange(longest)
    path = np.zeros((len(whole), longest), dtype=np.int64)
    path[column < whole[:, None]] = rows.path
    row = np.repeat(np.arange(len(whole)), rows.row_length)
    start = np.cumsum(rows.row_length) - rows.row_length
    depth = rows.row_shared[row] + np.arange(len(row)) - start[row]
    before = column < depth[:, None]
    query = np.repeat(path[row, depth], before.sum(1))
    return query, path[row][before]


def row_blocks(rows: FlatOrder) -> tuple[list[Block], Index]:
    """One rectangle for each bucket of prompts of like lengths, and of rows."""
    slots = np.empty(len(rows.source), dtype=np.int64)
    none = np.zeros_like(rows.prompt_length)
    prefix_start = rows.group_start[rows.row_group]
    prefix_size = rows.prompt_length[rows.row_group]
    blocks: list[Block] = []
    filled = 0
    for start, size, before_start, before_size in (
        (rows.group_start, rows.prompt_length, none, none),
        (rows.row_start, rows.row_length, prefix_start, prefix_size),
    ):
        for chosen in alike_lengths(size):
            block = rectangle(
                start[chosen], size[chosen], before_start[chosen], before_size[chosen]
            )
            place = np.arange(len(chosen)) * block.q_len + filled
            own = np.arange(block.q_len) < size[chosen][:, None]
            column = np.arange(block.q_len)
            slots[(start[chosen][:, None] + column)[own]] = (place[:, None] + column)[own]
            blocks.append(block)
            filled += len(chosen) * block.q_len
    return blocks, slots


def alike_lengths(row_length: Index) -> list[Index]:
    """Split rows that have inputs so that padding stays below half of every bucket."""
    ascending = np.argsort(row_length, kind="stable")
    remaining = ascending[row_length[ascending] > 0]
    result = []
    while len(remaining):
        longest = row_length[remaining[-1]]
        cut = int(np.searchsorted(row_length[remaining], longest * BUCKET, side="right"))
        result.append(remaining[cut:])
        remaining = remaining[:cut]
    return result


def rectangle(start: Index, size: Index, prefix_start: Index, prefix_size: Index) -> Block:
    """Rows of flat tokens that see a prefix elsewhere in the sequence, and themselves."""
    q_len, before = int(size.max()), int(prefix_size.max())
    column = np.arange(q_len)
    prefix_column = np.arange(before)
    own = column < size[:, None]
    prefix = prefix_column < prefix_size[:, None]
    q_index = np.where(own, start[:, None] + column, 0)
    q_positions = np.where(own, prefix_size[:, None] + column, 0)
    shape = (len(size), before)
    kv_index = np.concatenate(
        [np.where(prefix, prefix_start[:, None] + prefix_column, 0), q_index], axis=1
    )
    kv_positions = np.concatenate([np.broadcast_to(prefix_column, shape), q_positions], axis=1)
    valid = np.concatenate([prefix, own], axis=1)
    mask = valid[:, None, :] & (kv_positions[:, None, :] <= q_positions[:, :, None])
    index = torch.from_numpy(q_index.reshape(-1))
    return Block(
        size=len(size),
        q_len=q_len,
        kv_len=before + q_len,
        q_index=index,
        kv_index=torch.from_numpy(kv_index.reshape(-1)) if before else index,
        mask=torch.from_numpy(mask),
        q_positions=torch.from_numpy(q_positions),
        kv_positions=torch.from_numpy(kv_positions),
    )
