"""Which blocks of tokens see which, from the bounds of runs: a mask for FlexAttention.

A token of a packed layout sees two intervals of flat tokens: the end of its prompt, and its own
run up to itself. Three numbers a token say so, windows included, and what holds of blocks of 128
follows on the host, where the bounds are: nothing waits for the device, and no mask of tokens is
made. (Dong et al., "Flex Attention", arXiv:2412.05496, section 3.2, block masks.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import to_device
from rlflow.engines.hf.forward.prefixes import Index

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
# Fewer blocks would be compiled for by themselves: torch takes 0 and 1 for sizes that stay.
LEAST_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """What each flat token sees, int64 `[tokens]`.

    Token t sees the flat tokens from `own_start[t]` to itself, and those from
    `prefix_start[t]` up to `prefix_end[t]`, which is not seen.
    """

    own_start: Index
    prefix_start: Index
    prefix_end: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBlocks:
    """Pairs of blocks, bool `[query blocks, key blocks]`.

    In `partial` ones some queries see some keys, in `full` ones all of `BLOCK` queries see all.
    """

    partial: NDArray[np.bool_]
    full: NDArray[np.bool_]


def seen_keys(
    start: Index, length: Index, prefix_start: Index, prefix_length: Index, window: int | None
) -> SeenKeys:
    """Of runs that start at flat tokens, each after a prefix; `window` counts a token itself."""
    order = np.argsort(start)
    start, length = start[order], length[order]
    first, before = prefix_start[order], prefix_length[order]
    tokens = int(length.sum())
    run = np.repeat(np.arange(len(length)), length)
    at = np.arange(tokens)
    own, behind = start[run], first[run]
    end = behind + before[run]
    if window is not None:
        far = at - window + 1
        behind = np.minimum(np.maximum(behind, end + far - own), end)
        own = np.maximum(own, far)
    return SeenKeys(own_start=own, prefix_start=behind, prefix_end=end)


def seen_blocks(seen: SeenKeys, block: int = BLOCK) -> SeenBlocks:
    """The pairs of blocks that have anything to compute, and those that need no mask."""
    tokens = len(seen.own_start)
    count = max(-(-tokens // block), LEAST_BLOCKS)
    at = np.arange(tokens)
    some = np.zeros((count, count + 1), dtype=np.int64)
    every = np.zeros_like(some)
    for first, stop in ((seen.own_start, at + 1), (seen.prefix_start, seen.prefix_end)):
        used = stop > first
        rows, low, high = at[used] // block, first[used], stop[used]
        add_ranges(some, rows, low // block, -(-high // block))
        add_ranges(every, rows, -(-low // block), high // block)
    touched = some.cumsum(1)[:, :-1] > 0
    full = every.cumsum(1)[:, :-1] == block
    return SeenBlocks(partial=touched & ~full, full=full)


def add_ranges(counts: Index, rows: Index, first: Index, stop: Index) -> None:
    """Count one more from `first` up to `stop` in rows, as differences along a row."""
    used = stop > first
    width = counts.shape[1]
    flat = counts.reshape(-1)
    flat += np.bincount(rows[used] * width + first[used], minlength=flat.size)
    flat -= np.bincount(rows[used] * width + stop[used], minlength=flat.size)


def block_mask(seen: SeenKeys, device: torch.device) -> BlockMask:
    """The mask on a device, for `len(seen.own_start)` queries and as many keys.

    Queries of each block of keys, which a backward reads, are found on the device.
    """
    from torch.nn.attention.flex_attention import BlockMask

    own, behind, end = (
        to_device(torch.from_numpy(each.astype(np.int32)), device)
        for each in (seen.own_start, seen.prefix_start, seen.prefix_end)
    )

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_run = (own[query] <= key) & (key <= query)
        return in_run | ((behind[query] <= key) & (key < end[query]))

    blocks = seen_blocks(seen)
    some, every = (listed_blocks(each, device) for each in (blocks.partial, blocks.full))
    tokens = len(seen.own_start)
    made: Any = BlockMask.from_kv_blocks(
        *some, *every, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tokens, tokens)
    )
    found: BlockMask = made
    return found


def listed_blocks(pairs: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of keys a block of queries has, and which, those first; int32."""
    counts = pairs.sum(1).astype(np.int32)
    which = np.argsort(~pairs, axis=1, kind="stable").astype(np.int32)
    numbers, order = (to_device(torch.from_numpy(each), device) for each in (counts, which))
    return numbers[None, None], order[None, None]
