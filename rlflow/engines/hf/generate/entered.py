"""Rows that enter and leave a generation at any time, as one replica holds them.

Each row has its own columns of a cache. What rows have seen before is read once, rows of a group
that begin together as one. This file knows neither when rows enter nor what they draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import lengths, select_field
from rlflow.contract.values import InFlight, Named
from rlflow.engines.hf.forward.packed import pack_prompts
from rlflow.engines.hf.generate.attention import DecodeAttention
from rlflow.engines.hf.generate.cache import MULTIPLE, KeyValueCache, filled_up, stored_parts
from rlflow.engines.hf.generate.decoding import prefill
from rlflow.engines.hf.models import TorchModel
from rlflow.graph.rules.bands import first_narrow, moves_up

# Tokens that are read in one pass, where rows that enter have more.
READ_AT_ONCE = 1 << 16


class EnteredCache(KeyValueCache):
    """A cache that rows enter and leave; each has as many columns as tokens.

    There is room for `most` rows at the most, and at first for none. The first `live` rows are
    somebody's; `lengths` has how many tokens each of them has stored, and `sizes` has it on the
    host. Rows lie about in the order in which they entered, so that the last ones are read with
    fewer columns than the first.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        super().__init__(torch.zeros(0, dtype=torch.int64), 1, 0, device)
        self.most = _rows_for(most)
        self.ragged = True
        self.live = 0
        self.places = self.lengths
        self.sizes = np.zeros(0, dtype=np.int64)
        self.narrow, self.narrow_columns = 0, 0

    def enter(self, read: KeyValueCache, sources: Tensor) -> None:
        """Take rows in behind those that are live: copies of rows `sources` of a filled cache."""
        first, last = self.live, self.live + len(sources)
        self._widen(read.width, _rows_for(last))
        for layer, parts in read.buffers.items():
            self.buffers.setdefault(layer, tuple(self._made(part) for part in parts))
            for buffer, part in zip(self.buffers[layer], parts, strict=True):
                buffer[first:last, :, : read.width] = part[sources, :, : read.width]
        for layer, states in read.states.items():
            kept = self.states.setdefault(layer, {})
            for name, each in states.items():
                if name not in kept:
                    kept[name] = each.new_zeros(self.room, *each.shape[1:])
                kept[name][first:last] = each[sources]
        known = self.lengths[: self.live]
        self._lie(torch.cat([known, read.lengths[sources].to(known.device)]))

    def leave(self, ended: list[int]) -> Tensor:
        """Go on without the rows at ascending places `ended`; which row each place has then had."""
        order, narrow = list(range(self.live)), self.narrow
        for place in reversed(ended):
            places = moves_up(place, len(order), narrow)
            for to, source in itertools.pairwise(places):
                order[to] = order[source]
            order.pop()
            narrow -= place < narrow
        kept = torch.tensor(order, dtype=torch.int64, device=self.lengths.device)
        moved = (kept != torch.arange(len(order), device=kept.device)).nonzero()[:, 0]
        self.move_rows(kept[moved], moved)
        self._lie(self.lengths[kept])
        return kept

    def advance(self) -> None:
        """Open the next column of every live row."""
        self.biases = {}
        self.width = self.column = int(self.sizes.max())
        self._part()
        self.places = torch.arange(self.rows, device=self.lengths.device)
        self._widen(self.column + 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[rows, kv_heads, head_size]` into the open columns; what any live row has seen."""
        for buffer, tokens in stored_parts(self.buffers[layer], k, v):
            buffer[self.places, :, self.lengths] = tokens
        return self.seen(layer, v.shape[-1])

    def bands(self, seen: int, size: int) -> list[tuple[slice, int]]:
        """All live rows with what any has seen; or the last apart, which have seen less."""
        columns = filled_up(self.narrow_columns, size)
        if columns >= seen:
            return [(slice(0, self.live), seen)]
        return [(slice(0, self.narrow), seen), (slice(self.narrow, self.live), columns)]

    def _part(self) -> None:
        """Which rows are read apart: from row `narrow` on, with so many columns."""
        columns = (self.sizes + 1).tolist()
        self.narrow = first_narrow(columns)
        self.narrow_columns = max(columns[self.narrow :], default=self.column + 1)

    def close(self) -> None:
        """The open columns are stored."""
        self.lengths[: self.live] += 1
        self.sizes += 1

    def _lie(self, stored: Tensor) -> None:
        """So many tokens the live rows have stored; a few rows behind them are nobody's."""
        self.live = len(stored)
        self.rows = _rows_for(self.live)
        self.lengths = stored.new_zeros(self.rows)
        self.lengths[: self.live] = stored
        self.sizes = stored.cpu().numpy().copy()
        self.column = int(self.sizes.max()) - 1
        self.biases = {}

    def _made(self, part: Tensor) -> Tensor:
        _, heads, _, size = part.shape
        return part.new_zeros(self.room, heads, filled_up(self.columns, size), size)

    def _widen(self, columns: int, rows: int = 0) -> None:
        """See that there are so many columns and rows; where some lack, twice what there is."""
        wider, higher = columns > self.columns, rows > self.room
        if not wider and not higher:
            return
        self.columns = max(columns, 2 * self.columns) if wider else self.columns
        self.room = min(self.most, max(rows, 2 * self.room)) if higher else self.room
        for layer, parts in self.buffers.items():
            filled = filled_up(self.columns, min(part.shape[-1] for part in parts))
            self.buffers[layer] = tuple(self.widen(part, filled) for part in parts)
        for states in self.states.values() if higher else ():
            for name, each in states.items():
                states[name] = each.new_zeros(self.room, *each.shape[1:])
                states[name][: self.rows] = each[: self.rows]


def _rows_for(live: int) -> int:
    """So many rows, and a few that are nobody's."""
    return -(-live // MULTIPLE) * MULTIPLE


class LiveRows:
    """The live rows of a replica: their places among all, int64 `[live]`, logits and cache.

    There is `room` for so many.
    """

    def __init__(self, model: TorchModel, rows: InFlight, room: int) -> None:
        self.model, self.rows, self.room = model, rows, room
        self.made = rows.made.cpu().numpy().astype(np.int64)
        self.sizes = lengths(rows.seen)
        self.passes = self.read = 0
        self._empty()

    def _empty(self) -> None:
        self.live = np.zeros(0, dtype=np.int64)
        self.logits: Tensor | None = None
        self.cache = EnteredCache(self.room, self.model.device)
        self.attention = DecodeAttention(self.cache)

    def enter(self, groups: list[np.ndarray]) -> None:
        """Take the rows of groups in, each read at what it has seen."""
        for some in self._passes(groups):
            self._enter(some)

    def _passes(self, groups: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Groups that are read together."""
        some: list[np.ndarray] = []
        tokens = 0
        for where in groups:
            some.append(where)
            tokens += int(self.sizes[where].sum())
            if tokens >= READ_AT_ONCE:
                yield some
                some, tokens = [], 0
        if some:
            yield some

    def _enter(self, groups: list[np.ndarray]) -> None:
        """Read what rows have seen, once for the rows of a group that has just begun."""
        read: list[int] = []
        sources: list[int] = []
        for where in groups:
            alike = not self.made[where].any()
            sources += [len(read) + (0 if alike else k) for k in range(len(where))]
            read += [where[0]] if alike else where.tolist()
        seen = select_field(self.rows.seen, torch.tensor(read))
        self._read(seen, np.concatenate(groups), torch.tensor(sources))

    def _read(self, seen: Tensor, rows: np.ndarray, sources: Tensor) -> None:
        """Read ragged `seen [m, j]`, and take rows in, each behind the one of it in `sources`."""
        sizes = lengths(seen)
        layout = pack_prompts(seen, self.model.device)
        filled = KeyValueCache(sizes, 1, 1, self.model.device)
        logits = prefill(self.model, filled, layout, layout.targets)[: layout.predictions]
        self._take(filled, logits, rows, sources.to(self.model.device))
        self.read += int(sizes.sum())

    def _take(
        self, filled: KeyValueCache, logits: Tensor, rows: np.ndarray, sources: Tensor
    ) -> None:
        """Take rows in behind those that are live: those `sources` of a filled cache."""
        self.cache.enter(filled, sources)
        logits = logits[sources]
        self.logits = logits if self.logits is None else torch.cat([self.logits, logits])
        self.live = np.concatenate([self.live, rows])

    def come(self, rows: np.ndarray, found: Named | Tensor) -> None:
        """Take rows in that have grown elsewhere, from what they are there or from all tokens.

        Those are ragged int64 `[rows, j]`, prompt and response so far, and are read again.
        """
        sources = torch.arange(len(rows))
        if isinstance(found, torch.Tensor):
            self._read(found, rows, sources)
            return
        filled = KeyValueCache(found["lengths",].cpu(), 1, 0, self.model.device)
        for kind, *which in found:
            if kind == "part":
                layer, count = int(which[0]), len([k for k in found if k[:2] == (kind, which[0])])
                filled.buffers[layer] = tuple(found[kind, layer, n] for n in range(count))
            elif kind == "state":
                name = str(which[1]), int(which[2])
                filled.states.setdefault(int(which[0]), {})[name] = found[kind, *which]
        self._take(filled, found["logits",], rows, sources.to(self.model.device))

    def states_of(self, rows: np.ndarray) -> dict[tuple[str | int, ...], Tensor]:
        """What live rows have of keys, values and states, and their logits."""
        assert self.logits is not None
        cache, by_row = self.cache, np.argsort(self.live)
        where = torch.from_numpy(by_row[np.searchsorted(self.live, rows, sorter=by_row)])
        where = where.to(self.model.device)
        sizes = cache.lengths[where]
        columns = int(sizes.max())
        found: dict[tuple[str | int, ...], Tensor] = {("lengths",): sizes}
        found["logits",] = self.logits[where]
        for layer, parts in cache.buffers.items():
            for number, part in enumerate(parts):
                found["part", layer, number] = part[where, :, :columns]
        for layer, states in cache.states.items():
            found |= {("state", layer, *name): each[where] for name, each in states.items()}
        return found

    def leave(self, rows: np.ndarray) -> None:
        """Rows that are live are so no longer; some others go on."""
        assert self.logits is not None
        kept = self.cache.leave(np.flatnonzero(np.isin(self.live, rows)).tolist())
        self.live, self.logits = self.live[kept.cpu().numpy()], self.logits[kept]

    def follow(self, tokens: Tensor, going: np.ndarray) -> None:
        """Go on after `tokens [live]` with the rows that are `going`, bool `[live]`."""
        if not going.any():
            self._empty()
            return
        if not going.all():
            kept = self.cache.leave(np.flatnonzero(~going).tolist())
            self.live, tokens = self.live[kept.cpu().numpy()], tokens[kept]
        cache = self.cache
        cache.advance()
        filled = tokens.new_zeros(cache.rows)
        filled[: cache.live] = tokens
        logits = self.model.logits(filled, cache.lengths, self.attention, None)
        cache.close()
        self.logits = logits[: cache.live]
        self.passes += 1
