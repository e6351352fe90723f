"""Keys and values of the tokens that live rows have seen, one buffer per layer.

A row's tokens lie in the columns of their positions, so that in which order a row is added up does
not depend on the rows beside it; columns that it has not reached are hidden. Live rows are a prefix
of the buffers: dropping a row moves a live one into its place, and a row that goes on in several
ways is copied. Rows of a `RaggedCache` may have different numbers of new tokens. This file knows
neither models nor sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.engines.hf.forward.packed import LEAST_WIDTH, PackedLayout

# What a layer carries from token to token, rows first, by what it is and its number.
States = dict[tuple[str, int], Tensor]
# A few dropped rows stay to make the count a multiple of this: see packed.MULTIPLE.
MULTIPLE = 8
# Columns for new tokens at first; the buffers double when these are full.
FIRST_COLUMNS = 64
# torch.bmm leaves products of fewer multiplications to a plain loop, which adds otherwise.
SMALL_PRODUCT = 400


def filled_up(columns: int, head_size: int) -> int:
    """So many columns that hidden ones at the end change no sum: a library adds as it does there.

    They are a multiple of LEAST_WIDTH, and of the products of one query none is small.
    """
    least = max(columns, -(-SMALL_PRODUCT // head_size))
    return -(-least // LEAST_WIDTH) * LEAST_WIDTH


def stored_parts(stored: tuple[Tensor, ...], k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What is stored beside what of new keys and values goes there; latents are keys alone."""
    return list(zip(stored, (k, v)[: len(stored)], strict=True))


def keys_and_values(stored: tuple[Tensor, ...], size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `size`; those of latents are the first columns of the keys."""
    return stored[0], stored[0][..., :size] if len(stored) == 1 else stored[1]


class KeyValueCache:
    """Buffers `[rows, kv_heads, columns, head_size]` for keys and values of each layer.

    Of latents there is one buffer, of whose columns the first are the values. `states` are those
    of layers that carry some, `[rows, ...]`.

    `prompt_lengths` int64 `[prompts]`; every prompt has `n` rows at first, prompt-major, which may
    make up to `max_new_tokens` tokens, and branch until there are `branches` times as many. New
    tokens stand at the positions of their columns, or by `shifts` int64 `[rows]` further. All
    tensors are on `device`.
    """

    def __init__(
        self,
        prompt_lengths: Tensor,
        n: int,
        max_new_tokens: int,
        device: torch.device,
        branches: int = 1,
    ) -> None:
        self.n = n
        self.rows = len(prompt_lengths) * n
        self.room = self.rows * branches
        self.width = int(prompt_lengths.max()) if len(prompt_lengths) else 0
        self.limit = self.width + max_new_tokens
        self.columns = min(self.limit, self.width + FIRST_COLUMNS)
        self.column = self.width - 1
        self.lengths = prompt_lengths.to(device).repeat_interleave(n)
        self.shifts: Tensor | None = None
        self.ragged = bool((prompt_lengths != self.width).any())
        self.buffers: dict[int, tuple[Tensor, ...]] = {}
        self.states: dict[int, States] = {}
        self.prompt_places: Tensor | None = None
        self.biases: dict[tuple[torch.dtype, int | None, int], Tensor] = {}

    def fill(self, layer: int, parts: tuple[Tensor, ...], layout: PackedLayout) -> None:
        """Keep the flat keys and values of all prompts, once for each of their rows."""
        least = min(part.shape[-1] for part in parts)
        self.buffers[layer] = tuple(self.spread(part, layout, least) for part in parts)

    def fill_states(self, layer: int, states: States) -> None:
        """Keep the states after all prompts, once for each of their rows."""
        kept = {}
        for name, each in states.items():
            kept[name] = each.new_zeros(self.room, *each.shape[1:])
            kept[name][: self.rows] = each.repeat_interleave(self.n, 0)
        self.states[layer] = kept

    def spread(self, flat: Tensor, layout: PackedLayout, least: int) -> Tensor:
        """Flat tokens `[tokens, kv_heads, head_size]` to a buffer of all rows.

        `least` is the smaller size of keys and values.
        """
        prompts = self.rows // self.n
        _, heads, size = flat.shape
        if self.ragged:
            if self.prompt_places is None:
                length = self.lengths[:: self.n]
                column = torch.arange(self.width, device=flat.device)
                start = length.cumsum(0) - length
                place = start[:, None] + column
                # A place beyond its prompt's end holds a token that the bias hides.
                self.prompt_places = place.clamp(max=len(layout.tokens) - 1).flatten()
            flat = flat.index_select(0, self.prompt_places)
        else:
            flat = flat[: layout.real]
        buffer = flat.new_zeros(self.room, heads, filled_up(self.columns, least), size)
        by_prompt = buffer[: self.rows].view(prompts, self.n, heads, -1, size)
        by_head = flat.view(prompts, self.width, heads, size).transpose(1, 2)
        by_prompt[:, :, :, : self.width] = by_head[:, None]
        return buffer

    def positions(self, column: int) -> Tensor:
        """The positions of the rows' new tokens of a column, int64 `[rows]`."""
        places = self.lengths + column
        return places if self.shifts is None else places + self.shifts

    def advance(self) -> None:
        """Open the next column of every live row."""
        self.column += 1
        self.biases = {}
        if self.column == self.columns:
            self.grow()

    def grow(self) -> None:
        """Make room for twice as many new tokens, or for all that there may be."""
        columns = min(self.limit, self.width + 2 * (self.columns - self.width))
        for layer, parts in self.buffers.items():
            filled = filled_up(columns, min(part.shape[-1] for part in parts))
            self.buffers[layer] = tuple(self.widen(part, filled) for part in parts)
        self.columns = columns

    def widen(self, buffer: Tensor, columns: int) -> Tensor:
        """A buffer of the live rows with more columns, which are zero."""
        _, heads, before, size = buffer.shape
        wider = buffer.new_zeros(self.room, heads, columns, size)
        wider[: self.rows, :, :before] = buffer[: self.rows]
        return wider

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[rows, kv_heads, head_size]` into the open columns; what any live row has seen."""
        for buffer, tokens in stored_parts(self.buffers[layer], k, v):
            if self.ragged:
                row = torch.arange(self.rows, device=tokens.device)
                buffer[row, :, self.open_column()] = tokens
            else:
                buffer[: self.rows, :, self.column] = tokens
        return self.seen(layer, v.shape[-1])

    def seen(self, layer: int, size: int) -> tuple[Tensor, Tensor]:
        """Keys of the live rows and values of `size`, filled up with columns that are hidden."""
        keys, values = keys_and_values(self.buffers[layer], size)
        columns = filled_up(self.column + 1, min(keys.shape[-1], size))
        return keys[: self.rows, :, :columns], values[: self.rows, :, :columns]

    def bands(self, seen: int, size: int) -> list[tuple[slice, int]]:
        """Rows that are read together, and with how many of the columns that any has seen.

        `size` is the smaller one of keys and values.
        """
        return [(slice(0, self.rows), seen)]

    def open_column(self) -> Tensor:
        """The column of each live row's newest token, int64 `[rows]`."""
        return self.lengths[: self.rows] + (self.column - self.width)

    def bias(self, dtype: torch.dtype, window: int | None, columns: int) -> Tensor:
        """Numbers to add to the scores, `[rows, columns]`."""
        key = (dtype, window, columns)
        if key not in self.biases:
            last = self.open_column()[:, None]
            column = torch.arange(columns, device=last.device)
            hidden = column > last
            if window is not None:
                hidden |= last - column >= window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=last.device)
            self.biases[key] = bias.masked_fill_(hidden, float("-inf"))
        return self.biases[key]

    def branch(self, parents: Tensor) -> Tensor:
        """Go on with a copy of each row of ascending int64 `parents`, and with no other row.

        Returns int64 `[parents]`: the place of each. A row stays where it is if it can. `rows` may
        be a few more than there are parents, which nobody reads.
        """
        left = len(parents)
        stays = parents < left
        stays[1:] &= parents[1:] != parents[:-1]
        free = torch.ones(left, dtype=torch.bool, device=parents.device)
        free[parents[stays]] = False
        places = parents.masked_scatter(~stays, free.nonzero()[:, 0])
        # A free place has no parent in it, so nothing is written over that is still to be read.
        self.move_rows(parents[~stays], places[~stays])
        lengths = self.lengths[parents]
        self.rows = min(self.room, -(-left // MULTIPLE) * MULTIPLE)
        self.lengths = lengths.new_full((self.rows,), self.width)
        self.lengths[places] = lengths
        if self.shifts is not None:
            moved = self.shifts[parents]
            self.shifts = moved.new_zeros(self.rows)
            self.shifts[places] = moved
        self.biases = {}
        return places

    def move_rows(self, sources: Tensor, places: Tensor) -> None:
        """Put rows into other places, with what they have seen in all layers."""
        seen = self.column + 1
        for parts in self.buffers.values():
            for buffer in parts:
                buffer[places, :, :seen] = buffer[sources, :, :seen]
        for states in self.states.values():
            for state in states.values():
                state[places] = state[sources]

    def keep(self, live: Tensor) -> Tensor:
        """Drop the rows that are false in bool `live [rows]`; the order of those that stay.

        Returns int64 `[rows left]`: the old place of each row in its new place. `rows` may be
        a few more, which nobody reads.
        """
        parents = live.nonzero()[:, 0]
        return torch.empty_like(parents).index_copy_(0, self.branch(parents), parents)


class RaggedCache(KeyValueCache):
    """A cache whose rows take several tokens at a time, each row from a column of its own.

    What a row has from there on is written over, and what lies behind its open columns is
    hidden.
    """

    def __init__(
        self, prompt_lengths: Tensor, n: int, max_new_tokens: int, device: torch.device
    ) -> None:
        super().__init__(prompt_lengths, n, max_new_tokens, device)
        self.open_columns = self.lengths.new_empty(0, 0)
        self.visible: dict[tuple[int | None, int], Tensor] = {}

    def open(self, starts: Tensor, span: int, furthest: int) -> None:
        """Open `span` columns for every live row, from new token `starts` int64 `[rows]` on.

        `furthest` is the largest of `starts`.
        """
        new = starts[:, None] + torch.arange(span, device=starts.device)
        self.open_columns = new + self.lengths[:, None]
        self.visible = {}
        self.column = self.width + furthest + span - 1
        while self.columns <= self.column < self.limit:
            self.grow()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[rows * span, kv_heads, head_size]` into the open columns; all seen by any row."""
        rows, span = self.open_columns.shape
        row = torch.arange(rows, device=k.device)[:, None]
        for buffer, tokens in stored_parts(self.buffers[layer], k, v):
            buffer[row, :, self.open_columns] = tokens.view(rows, span, *tokens.shape[1:])
        return self.seen(layer, v.shape[-1])

    def sees(self, window: int | None, columns: int) -> Tensor:
        """Whether the token in an open column sees a column, bool `[rows, span, columns]`."""
        key = (window, columns)
        if key not in self.visible:
            column = torch.arange(columns, device=self.lengths.device)
            last = self.open_columns[:, :, None]
            seen = column <= last
            if window is not None:
                seen &= last - column < window
            self.visible[key] = seen
        return self.visible[key]
