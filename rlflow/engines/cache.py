"""Keys and values of the tokens that live rows have seen, one buffer per layer.

Prompts lie left-aligned in the first columns; the n-th new token of every row lies in one
common column after them. Live rows are a prefix of the buffers: dropping a row moves the last
live one into its place. Rows of a `RaggedCache` may have different numbers of new tokens. This
file knows neither models nor sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.engines.packed import Layout

# A few dropped rows stay to make the count a multiple of this: see packed.MULTIPLE.
MULTIPLE = 8
# Columns for new tokens at first; the buffers double when these are full.
FIRST_COLUMNS = 64


class KeyValueCache:
    """Buffers `[rows, kv_heads, columns, head_size]` for keys and values of each layer.

    `prompt_lengths` int64 `[prompts]`; every prompt has `n` rows, prompt-major, which may make
    up to `max_new_tokens` tokens. All tensors are on `device`.
    """

    def __init__(
        self, prompt_lengths: Tensor, n: int, max_new_tokens: int, device: torch.device
    ) -> None:
        self.n = n
        self.rows = len(prompt_lengths) * n
        self.width = int(prompt_lengths.max()) if len(prompt_lengths) else 0
        self.limit = self.width + max_new_tokens
        self.columns = min(self.limit, self.width + FIRST_COLUMNS)
        self.column = self.width - 1
        self.lengths = prompt_lengths.to(device).repeat_interleave(n)
        self.ragged = bool((prompt_lengths != self.width).any())
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.prompt_places: Tensor | None = None

    def fill(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> None:
        """Keep the flat keys and values of all prompts, once for each of their rows."""
        self.buffers[layer] = (self.spread(k, layout), self.spread(v, layout))

    def spread(self, flat: Tensor, layout: Layout) -> Tensor:
        """Flat tokens `[tokens, kv_heads, head_size]` to a buffer of all rows."""
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
        buffer = flat.new_empty(prompts, self.n, heads, self.columns, size)
        by_head = flat.view(prompts, self.width, heads, size).transpose(1, 2)
        buffer[:, :, :, : self.width] = by_head[:, None]
        return buffer.flatten(0, 1)

    def advance(self) -> None:
        """Open the next column for every live row."""
        self.column += 1
        if self.column == self.columns:
            self.grow()

    def grow(self) -> None:
        """Make room for twice as many new tokens, or for all that there may be."""
        columns = min(self.limit, self.width + 2 * (self.columns - self.width))
        for layer, pair in self.buffers.items():
            self.buffers[layer] = (self.widen(pair[0], columns), self.widen(pair[1], columns))
        self.columns = columns

    def widen(self, buffer: Tensor, columns: int) -> Tensor:
        """A buffer of the live rows with more columns."""
        _, heads, _, size = buffer.shape
        wider = buffer.new_empty(self.rows, heads, columns, size)
        wider[:, :, : self.columns] = buffer[: self.rows]
        return wider

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[rows, kv_heads, head_size]` into the open column; all that live rows have seen."""
        keys, values = self.buffers[layer]
        keys[: self.rows, :, self.column] = k
        values[: self.rows, :, self.column] = v
        seen = self.column + 1
        return keys[: self.rows, :, :seen], values[: self.rows, :, :seen]

    def bias(self, dtype: torch.dtype, window: int | None) -> Tensor | None:
        """Numbers to add to the scores, `[rows, seen]`, or None where every key is seen."""
        seen = self.column + 1
        if window is not None and seen <= window:
            window = None
        if not self.ragged and window is None:
            return None
        length = self.lengths[: self.rows, None]
        column = torch.arange(seen, device=length.device)[None]
        hidden = (column >= length) & (column < self.width)
        if window is not None:
            position = torch.where(column < self.width, column, column - self.width + length)
            hidden |= position[:, -1:] - position >= window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=length.device)
        return bias.masked_fill_(hidden, float("-inf"))

    def keep(self, live: Tensor) -> Tensor:
        """Drop the rows that are false in bool `live [rows]`; the order of those that stay.

        Returns int64 `[rows left]`: the old place of each row in its new place. `rows` may be
        a few more, which nobody reads.
        """
        left = int(live.sum())
        places = torch.arange(left, device=live.device)
        holes = (~live[:left]).nonzero()[:, 0]
        movers = live[left:].nonzero()[:, 0] + left
        places[holes] = movers
        seen = self.column + 1
        for pair in self.buffers.values():
            for buffer in pair:
                buffer[holes, :, :seen] = buffer[movers, :, :seen]
        self.rows = min(self.rows, -(-left // MULTIPLE) * MULTIPLE)
        self.lengths[:left] = self.lengths[places]
        self.lengths = self.lengths[: self.rows]
        return places


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
        self.visible: dict[int | None, Tensor] = {}

    def spread(self, flat: Tensor, layout: Layout) -> Tensor:
        """A buffer of all rows whose columns of new tokens are zero, so that 0 times them is 0."""
        buffer = super().spread(flat, layout)
        buffer[:, :, self.width :] = 0
        return buffer

    def widen(self, buffer: Tensor, columns: int) -> Tensor:
        """A buffer of the live rows with more columns, which are zero."""
        wider = super().widen(buffer, columns)
        wider[:, :, self.columns :] = 0
        return wider

    def open(self, starts: Tensor, span: int, furthest: int) -> None:
        """Open `span` columns for every live row, from new token `starts` int64 `[rows]` on.

        `furthest` is the largest of `starts`.
        """
        new = starts[:, None] + torch.arange(span, device=starts.device)
        self.open_columns = new + self.width
        self.visible = {}
        self.column = self.width + furthest + span - 1
        while self.columns <= self.column < self.limit:
            self.grow()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[rows * span, kv_heads, head_size]` into the open columns; all seen by any row."""
        rows, span = self.open_columns.shape
        row = torch.arange(rows, device=k.device)[:, None]
        for buffer, tokens in zip(self.buffers[layer], (k, v), strict=True):
            buffer[row, :, self.open_columns] = tokens.view(rows, span, *tokens.shape[1:])
        keys, values = self.buffers[layer]
        seen = self.column + 1
        return keys[:rows, :, :seen], values[:rows, :, :seen]

    def sees(self, window: int | None) -> Tensor:
        """Whether the token in an open column sees a column, bool `[rows, span, seen]`."""
        if window not in self.visible:
            column = torch.arange(self.column + 1, device=self.lengths.device)
            length = self.lengths[: self.rows, None, None]
            last = self.open_columns[:, :, None]
            seen = ((column < length) | (column >= self.width)) & (column <= last)
            if window is not None:
                position = torch.where(column < self.width, column, column - self.width + length)
                seen &= last - self.width + length - position < window
            self.visible[window] = seen
        return self.visible[window]
