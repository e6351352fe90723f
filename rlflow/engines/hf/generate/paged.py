"""Keys and values of rows in blocks of one pool, and attention of one new token per row on them.

A row's tokens lie in the blocks that its line of a table names, whole blocks of a prompt once for
all of its rows. Pools, tables and what is computed from them keep their addresses and shapes, so
that a step over them can be replayed. Which blocks are whose is known on the host, `RowBlocks`.
This file knows neither models nor sampling.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import to_device
from rlflow.engines.hf.forward.attention import Traits, probabilities, score_traits
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.forward.sequences import FLASH_DTYPES, Visible, flash_fits
from rlflow.engines.hf.generate.attention import mix_values
from rlflow.engines.hf.generate.cache import States, keys_and_values, stored_parts
from rlflow.modelfiles.paging import BLOCK, blocks_for

NOBODYS = 0
"""The block that rows without a place write to."""
# Of outputs about one tenth in size, computed in bfloat16 by two ways.
CLOSE = 2e-2
Table = NDArray[np.int32]


class RowBlocks:
    """Whose the blocks are: a line of `table` per row, its first `held` entries in use.

    The first `shared` of a line are those of its prompt, which lie in those of `rows / n` prompts.
    """

    def __init__(self, blocks: int, rows: int, n: int, width: int) -> None:
        self.free = list(range(blocks - 1, NOBODYS, -1))
        self.table: Table = np.full((rows, width), NOBODYS, dtype=np.int32)
        self.held = np.zeros(rows, dtype=np.int64)
        self.shared = np.zeros(rows, dtype=np.int64)
        self.n = n
        self.sharing = np.zeros(rows // n, dtype=np.int64)

    def begin(self, prompt: int, whole: int) -> None:
        """Give a prompt its whole blocks, in the lines of all its rows."""
        rows = slice(prompt * self.n, (prompt + 1) * self.n)
        self.table[rows, :whole] = [self.free.pop() for _ in range(whole)]
        self.held[rows] = self.shared[rows] = whole
        self.sharing[prompt] = self.n

    def missing(self, row: int, tokens: int) -> int:
        """Blocks that a row lacks for so many tokens, prompt included."""
        return max(blocks_for(tokens) - int(self.held[row]), 0)

    def extend(self, row: int, tokens: int) -> None:
        """Give a row blocks for so many tokens."""
        for _ in range(self.missing(row, tokens)):
            self.table[row, self.held[row]] = self.free.pop()
            self.held[row] += 1

    def own(self, row: int) -> Table:
        """The blocks that are the row's alone."""
        return self.table[row, self.shared[row] : self.held[row]].copy()

    def set_aside(self, row: int) -> None:
        """Take a row's own blocks."""
        self.free += self.own(row).tolist()
        self.held[row] = self.shared[row]

    def end(self, row: int) -> None:
        """Take a row's blocks, and those of its prompt with the last of its rows."""
        self.set_aside(row)
        prompt = row // self.n
        self.sharing[prompt] -= 1
        if not self.sharing[prompt]:
            self.free += self.table[row, : self.shared[row]].tolist()


class PagedCache:
    """Pools `[blocks * BLOCK, kv_heads, head_size]` of keys and of values, a pair for each layer.

    Of latents there is one, whose first columns are the values. They are made with the first
    prompts and stay; `takes_runs` says whether the kernel reads them as `BlockRuns`. `table` int32
    `[slots, width]` is what the rows in the slots of a step have; `places` and `sources` say where
    the next prompts' tokens go. `states` are those of layers that carry some, a line for each of
    `rows` and one that is nobody's; `begun` are the rows of the next prompts.
    """

    def __init__(
        self, blocks: int, slots: int, width: int, device: torch.device, rows: int = 0
    ) -> None:
        self.blocks = blocks
        self.device = device
        self.pools: dict[int, tuple[Tensor, ...]] = {}
        self.takes_runs = False
        self.states: dict[int, States] = {}
        self.rows = rows
        self.table = torch.zeros(slots, width, dtype=torch.int32, device=device)
        self.places = self.sources = torch.empty(0, dtype=torch.int64, device=device)
        self.begun = self.places

    def expect(self, prompts: list[int], sizes: NDArray[np.int64], held: RowBlocks) -> None:
        """Say where tokens of prompts go that are filled in next, in this order.

        Whole blocks go where the prompt's are, what is left to the first block of each row.
        """
        places, sources, start = [], [], 0
        inside = np.arange(BLOCK)
        for prompt in prompts:
            size = int(sizes[prompt])
            whole = size // BLOCK
            first = prompt * held.n
            blocks = held.table[first, :whole, None].astype(np.int64) * BLOCK
            places.append((blocks + inside).reshape(-1))
            sources.append(start + np.arange(whole * BLOCK))
            rest = np.arange(whole * BLOCK, size)
            if len(rest):
                own = held.table[first : first + held.n, whole, None].astype(np.int64) * BLOCK
                places.append((own + rest - whole * BLOCK).reshape(-1))
                sources.append(np.tile(start + rest, held.n))
            start += size
        begun = (np.array(prompts)[:, None] * held.n + np.arange(held.n)).reshape(-1)
        self.begun = to_device(torch.from_numpy(begun), self.device)
        self.places, self.sources = (
            to_device(torch.from_numpy(np.concatenate(each)), self.device)
            for each in (places, sources)
        )

    def fill(self, layer: int, parts: tuple[Tensor, ...], layout: PackedLayout) -> None:
        """Keep the flat keys and values of the prompts that are expected."""
        if layer not in self.pools:
            # What is read and hidden is multiplied by 0, so it has to be a number.
            self.pools[layer] = tuple(
                flat.new_zeros(self.blocks * BLOCK, *flat.shape[1:]) for flat in parts
            )
            self.takes_runs = kernel_takes_runs(parts[0].device, parts[0].dtype)
        for pool, flat in zip(self.pools[layer], parts, strict=True):
            pool.index_copy_(0, self.places, flat.index_select(0, self.sources))

    def fill_states(self, layer: int, states: States) -> None:
        """Keep the states after the prompts that are expected, once for each of their rows."""
        held = self.states.setdefault(layer, {})
        for name, each in states.items():
            if name not in held:
                held[name] = each.new_zeros(self.rows + 1, *each.shape[1:])
            times = len(self.begun) // len(each)
            held[name].index_copy_(0, self.begun, each.repeat_interleave(times, 0))

    def take_out(self, blocks: Table) -> list[Tensor]:
        """Copies of blocks of all pools in host memory, whose copying need not be over."""
        index = to_device(torch.from_numpy(blocks.astype(np.int64)), self.device)
        return [to_host_soon(part.index_select(0, index)) for part in self._by_block()]

    def put_back(self, blocks: Table, copies: list[Tensor]) -> None:
        """Fill blocks of all pools with what was taken out of as many others."""
        index = to_device(torch.from_numpy(blocks.astype(np.int64)), self.device)
        for part, copy in zip(self._by_block(), copies, strict=True):
            part.index_copy_(0, index, copy.to(self.device, non_blocking=True))

    def _by_block(self) -> list[Tensor]:
        return [
            part.view(-1, BLOCK, *part.shape[1:]) for pair in self.pools.values() for part in pair
        ]

    def num_bytes(self) -> int:
        """Bytes of all pools, and of states."""
        pooled = sum(part.nbytes for parts in self.pools.values() for part in parts)
        return pooled + sum(each.nbytes for held in self.states.values() for each in held.values())


def to_host_soon(x: Tensor) -> Tensor:
    """A copy in host memory; of a CUDA device's in pinned pages, which are filled later."""
    if x.device.type != "cuda":
        return x.cpu()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Blocks as runs of keys for a kernel, `rows * width` of them, each with one query.

    `starts` int32 `[runs + 1]`: where a run begins in a pool; `used` int32 `[runs]`: its tokens.
    """

    queries: Tensor
    starts: Tensor
    used: Tensor


class PagedAttention:
    """Attention of one new token per slot on what its row has seen, without gradient.

    Where torch's kernel takes the numbers every block is a run of keys of its own, and the parts
    of a row are merged by their log-sums: the kernel reads no table, only where runs begin and how
    many keys of each count. Elsewhere blocks are gathered and hidden places get -inf. `table`
    `[rows, width]`, `positions` int64 and `live` bool `[rows]`; a row that is not live sees a
    token of somebody's, and what comes of it nobody reads.
    """

    def __init__(
        self,
        cache: PagedCache,
        table: Tensor,
        positions: Tensor,
        live: Tensor,
        row: Tensor | None = None,
    ) -> None:
        self.cache = cache
        self.row = torch.arange(len(live), device=live.device) if row is None else row
        self.kept_row = torch.where(live, self.row, cache.rows)
        self.table = table.long()
        inside = positions % BLOCK
        block = self.table.gather(1, (positions // BLOCK)[:, None])[:, 0]
        self.place = torch.where(live, block, NOBODYS) * BLOCK + inside
        self.seen = torch.where(live, positions + 1, 1)
        self.hidden: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self.runs: dict[int | None, BlockRuns] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """`q [rows, heads, size]` on everything the rows have seen, itself included."""
        pools = self.cache.pools[layer]
        for pool, tokens in stored_parts(pools, k, v):
            pool.index_copy_(0, self.place, tokens)
        seen = Visible(scale=traits.scaling, causal=False, softcap=traits.softcap)
        alike = len(pools) == 2 and q.shape[-1] == v.shape[-1]
        if self.cache.takes_runs and alike and flash_fits(q, v, seen):
            return self.attend_runs(q, pools[0], pools[1], traits)
        return self.attend_gathered(q, pools, v.shape[-1], traits)

    def attend_gathered(
        self, q: Tensor, pools: tuple[Tensor, ...], value_size: int, traits: Traits
    ) -> Tensor:
        """By matrix products on copies of the blocks, one layer's at a time."""
        rows, heads, size = q.shape
        kv_heads = pools[0].shape[1]
        copies = tuple(
            pool.view(-1, BLOCK, *pool.shape[1:])[self.table].flatten(1, 2).transpose(1, 2)
            for pool in pools
        )
        key, value = keys_and_values(copies, value_size)
        columns = key.shape[2]
        queries = q.reshape(rows * kv_heads, heads // kv_heads, size)
        scores = torch.bmm(queries, key.flatten(0, 1).transpose(1, 2)).mul_(traits.scaling)
        scores = score_traits(scores, traits).view(rows, kv_heads, -1, columns)
        scores = scores + self.bias(traits.window, scores.dtype)[:, None, None]
        probs = probabilities(scores.view(rows, heads, 1, columns), traits)
        output = mix_values(probs.reshape(rows * kv_heads, -1, columns), value.flatten(0, 1))
        return output.view(rows, heads, value.shape[-1])

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Numbers to add to the scores, `[rows, width * BLOCK]`."""
        key = (window, dtype)
        if key not in self.hidden:
            column = torch.arange(self.table.shape[1] * BLOCK, device=self.seen.device)
            hidden = column >= self.seen[:, None]
            if window is not None:
                hidden |= column < self.seen[:, None] - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.hidden[key] = bias.masked_fill_(hidden, float("-inf"))
        return self.hidden[key]

    def attend_runs(self, q: Tensor, keys: Tensor, values: Tensor, traits: Traits) -> Tensor:
        """By torch's kernel on every block, its parts merged in float32."""
        rows, width = self.table.shape
        runs = self.runs_within(traits.window)
        repeated = q[:, None].expand(-1, width, -1, -1).flatten(0, 1)
        part, sums = run_kernel(repeated, keys, values, runs, traits.scaling)
        level = torch.where(runs.used > 0, sums, float("-inf")).view(-1, rows, width)
        whole = level.logsumexp(-1)
        if traits.sinks is not None:
            whole = torch.logaddexp(whole, traits.sinks.to(whole.dtype)[:, None])
        weight = (level - whole[..., None]).exp().permute(1, 2, 0)[..., None]
        return (part.view(rows, width, *part.shape[1:]) * weight).sum(1).to(q.dtype)

    def runs_within(self, window: int | None) -> BlockRuns:
        """The runs that rows see, all of their tokens or the last `window`; once for all layers."""
        if window not in self.runs:
            rows, width = self.table.shape
            begin = torch.arange(width, device=self.seen.device) * BLOCK
            until = (self.seen[:, None] - begin).clamp(0, BLOCK)
            since = torch.zeros_like(until)
            if window is not None:
                since = (self.seen[:, None] - window - begin).clamp(0, BLOCK)
            used = (until - since).clamp(min=0)
            starts = (self.table * BLOCK + since).flatten()
            self.runs[window] = BlockRuns(
                torch.arange(rows * width + 1, dtype=torch.int32, device=starts.device),
                torch.cat([starts, starts.new_zeros(1)]).int(),
                used.flatten().int(),
            )
        return self.runs[window]


def run_kernel(
    q: Tensor, keys: Tensor, values: Tensor, runs: BlockRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs `[runs, heads, size]` and log-sums float32 `[heads, runs]` of torch's own kernel.

    A run's keys are the `used` ones from its start on, wherever the next run starts: that is what
    the operator makes of `seqused_k`, which it takes in every version that has the kernel.
    """
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, runs.queries, runs.starts, 1, BLOCK, 0.0, False, False,
        scale=scale, seqused_k=runs.used,
    )  # fmt: skip
    return output, sums


@cache
def kernel_takes_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel gives on a device what products of matrices do, for runs out of order.

    It is compared once, on a few rows; where it takes no such runs, or reads them otherwise, blocks
    are gathered, and a warning says so.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or dtype not in FLASH_DTYPES:
        return False
    made = torch.Generator(device).manual_seed(0)
    trial = PagedCache(6, 2, 3, device)
    shape = (6 * BLOCK, 2, 64)
    keys, values = (torch.randn(shape, generator=made, device=device).to(dtype) for _ in range(2))
    trial.pools[0] = keys, values
    q = torch.randn(2, 4, 64, generator=made, device=device).to(dtype)
    table = torch.tensor([[5, 2, 4], [3, 1, 0]], device=device)
    positions = torch.tensor([2 * BLOCK + 17, BLOCK - 1], device=device)
    trait = Traits(scaling=0.125)
    state = PagedAttention(trial, table, positions, torch.ones_like(positions, dtype=torch.bool))
    expected = state.attend_gathered(q, trial.pools[0], 64, trait)
    if not flash_fits(q, q, Visible(scale=trait.scaling, causal=False)):
        return False
    try:
        found = state.attend_runs(q, keys, values, trait)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    else:
        if bool(((found - expected).abs() < CLOSE).all()):
            return True
        why = "its results differ from products of matrices"
    warnings.warn(f"decoding gathers blocks, which is slower: torch's kernel: {why}", stacklevel=2)
    return False
