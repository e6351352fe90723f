"""Rows that enter and leave a generation at any time: each row stands at a token of its own.

Every live row draws a token a turn, a row that has ended leaves, and the next group begins as soon
as there is room for its rows. What rows have seen before is read once, rows of a group that begin
together as one. A sample's tokens depend on the weights, what it has seen and its own random
numbers, never on who is beside it. This file knows neither engines nor iterations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import lengths, ragged, select_field
from rlflow.contract.progress import advance
from rlflow.contract.values import Advanced, InFlight, SampleKey, Sampling
from rlflow.engines.hf.forward.attention import DecodeAttention
from rlflow.engines.hf.forward.packed import pack_prompts
from rlflow.engines.hf.generate.cache import MULTIPLE, KeyValueCache, filled_up, stored_parts
from rlflow.engines.hf.generate.decoding import DRAWN, prefill
from rlflow.engines.hf.generate.rng import uniforms
from rlflow.engines.hf.generate.sampling import draw_tokens, require_finite
from rlflow.engines.hf.models import TorchModel

# Tokens that are read in one pass, where rows that enter have more.
READ_AT_ONCE = 1 << 16


class EnteredCache(KeyValueCache):
    """A cache that rows enter and leave; each has as many columns as tokens.

    The first `live` rows are somebody's; `lengths` has how many tokens each of them has stored.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(torch.zeros(0, dtype=torch.int64), 1, 0, device)
        self.room = -(-rows // MULTIPLE) * MULTIPLE
        self.ragged = True
        self.live = 0
        self.places = self.lengths

    def enter(self, read: KeyValueCache, sources: Tensor) -> None:
        """Take rows in behind those that are live: copies of rows `sources` of a filled cache."""
        first, last = self.live, self.live + len(sources)
        self._widen(read.width)
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

    def leave(self, kept: Tensor) -> Tensor:
        """Go on with the rows of ascending int64 `kept` alone; the place of each."""
        known = self.lengths[kept]
        places = self.branch(kept)
        lie = torch.empty_like(known)
        lie[places] = known
        self._lie(lie)
        return places

    def advance(self) -> None:
        """Open the next column of every live row."""
        self.biases = {}
        self.width = self.column = int(self.lengths[: self.live].max())
        self.places = torch.arange(self.rows, device=self.lengths.device)
        self._widen(self.column + 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put `[rows, kv_heads, head_size]` into the open columns; what any live row has seen."""
        for buffer, tokens in stored_parts(self.buffers[layer], k, v):
            buffer[self.places, :, self.lengths] = tokens
        return self.seen(layer, v.shape[-1])

    def close(self) -> None:
        """The open columns are stored."""
        self.lengths[: self.live] += 1

    def _lie(self, stored: Tensor) -> None:
        """So many tokens the live rows have stored; a few rows behind them are nobody's."""
        self.live = len(stored)
        self.rows = min(self.room, -(-self.live // MULTIPLE) * MULTIPLE)
        self.lengths = stored.new_zeros(self.rows)
        self.lengths[: self.live] = stored
        self.column = int(stored.max()) - 1
        self.biases = {}

    def _made(self, part: Tensor) -> Tensor:
        _, heads, _, size = part.shape
        return part.new_zeros(self.room, heads, filled_up(self.columns, size), size)

    def _widen(self, columns: int) -> None:
        """See that there are so many columns; with those that there are, twice as many."""
        if columns <= self.columns:
            return
        self.columns = max(columns, 2 * self.columns)
        for layer, parts in self.buffers.items():
            filled = filled_up(self.columns, min(part.shape[-1] for part in parts))
            self.buffers[layer] = tuple(self.widen(part, filled) for part in parts)


class ContinuousDecoding:
    """The rows in flight of one model, turn by turn."""

    def __init__(
        self,
        model: TorchModel,
        rows: InFlight,
        sampling: Sampling,
        key: SampleKey,
        stopped: Callable[[], bool],
    ) -> None:
        self.model, self.rows, self.key, self.stopped = model, rows, key, stopped
        self.sampling = sampling
        device = model.device
        count = len(rows.ids)
        self.made = rows.made.cpu().numpy().astype(np.int64)
        self.ids = rows.ids.cpu().numpy().astype(np.int64)
        self.draws = rows.draws.cpu().numpy().astype(np.int64)
        self.groups = rows.groups.cpu().numpy().astype(np.int64)
        self.begun = set(rows.begun)
        self.ended: list[int] = []
        self.got = np.zeros(count, dtype=np.int64)
        self.numbers = np.zeros((count, DRAWN))
        # Of each turn: the rows that were live, and what they drew.
        self.taken: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        self.tokens = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.log_probs = [torch.zeros(0, dtype=torch.float32, device=device)]
        self.finished = torch.zeros(count, dtype=torch.bool)
        self.over = torch.zeros(count, dtype=torch.bool)
        self.stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        self.left = Counter(self.groups.tolist())
        names, first = np.unique(self.groups, return_index=True)
        places = dict(zip(names.tolist(), np.split(np.arange(count), first[1:]), strict=True))
        self.waiting = deque((group, where) for group, where in places.items() if len(where))
        most_rows = max([rows.at_once, *(len(where) for where in places.values())])
        going = sum(len(places[group]) for group in rows.begun if group in places)
        self.room = max(most_rows, going)
        self.cache = EnteredCache(self.room, device)
        self.attention = DecodeAttention(self.cache)
        self.live = np.zeros(0, dtype=np.int64)
        self.logits: Tensor | None = None
        self.passes = self.read = self.turns = 0

    def run(self) -> Advanced:
        """Make turns until enough groups are complete and as many as asked, or nothing is left."""
        with torch.inference_mode():
            known, met = -1, False
            while True:
                if not met and known != len(self.ended):
                    met, known = self.rows.met(self.begun, self.ended), len(self.ended)
                if (met and self.turns >= self.rows.least) or not self._begin():
                    break
                if met and len(self.live) < self.rows.few:
                    break
                self._turn()
                self.turns += 1
                advance(1, "turns of tokens")
        return self._result()

    def _begin(self) -> bool:
        """Let rows begin; whether there are any, and none has asked to stop."""
        while entering := self._entering():
            self._enter(entering)
        return bool(len(self.live)) and not self.stopped()

    def _turn(self) -> None:
        """Draw a token of every live row."""
        going = self._draw()
        if not going.all():
            self._leave(going)
        if len(self.live):
            self._forward()

    def _entering(self) -> list[np.ndarray]:
        """The rows of the groups that enter now: all that go on, and others while there is room."""
        found: list[np.ndarray] = []
        tokens, live = 0, len(self.live)
        while self.waiting and tokens < READ_AT_ONCE:
            group, where = self.waiting[0]
            if group not in self.begun and live + len(where) > self.rows.at_once and live:
                break
            self.waiting.popleft()
            self.begun.add(group)
            found.append(where)
            live += len(where)
            tokens += int(lengths(self.rows.seen)[where].sum())
        return found

    def _enter(self, groups: list[np.ndarray]) -> None:
        """Read what rows have seen, once for the rows of a group that has just begun."""
        read: list[int] = []
        sources: list[int] = []
        for where in groups:
            alike = not self.made[where].any()
            sources += [len(read) + (0 if alike else k) for k in range(len(where))]
            read += [where[0]] if alike else where.tolist()
        seen = select_field(self.rows.seen, torch.tensor(read))
        sizes = lengths(seen)
        layout = pack_prompts(seen, self.model.device)
        filled = KeyValueCache(sizes, 1, 1, self.model.device)
        logits = prefill(self.model, filled, layout, layout.targets)[: layout.predictions]
        order = torch.tensor(sources, device=self.model.device)
        self.cache.enter(filled, order)
        logits = logits[order]
        self.logits = logits if self.logits is None else torch.cat([self.logits, logits])
        self.live = np.concatenate([self.live, *groups])
        self.read += int(sizes.sum())

    def _draw(self) -> np.ndarray:
        """Draw a token of every live row; which of them go on, bool `[live]`."""
        assert self.logits is not None
        uniform = torch.from_numpy(self._uniform()).to(self.model.device)
        tokens, log_probs = draw_tokens(self.logits, uniform, self.sampling)
        self.taken.append(self.live)
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        self.drawn = tokens
        self.got[self.live] += 1
        finished = (tokens[:, None] == self.stops).any(-1).cpu().numpy()
        full = self.made[self.live] + self.got[self.live] >= self.sampling.max_new_tokens
        self.finished[self.live[finished]] = True
        return ~(finished | full)

    def _uniform(self) -> np.ndarray:
        """The random numbers of the live rows for their next tokens, float64 `[live]`."""
        if self.sampling.temperature == 0:
            return np.zeros(len(self.live))
        place = self.got[self.live] % DRAWN
        lacking = self.live[place == 0]
        if len(lacking):
            first = self.made[lacking] + self.got[lacking]
            key, draws = self.key, self.draws[lacking]
            self.numbers[lacking] = uniforms(
                key.seed, draws, key.stream, self.ids[lacking], DRAWN, first=first
            )
        found: np.ndarray = self.numbers[self.live, place]
        return found

    def _leave(self, going: np.ndarray) -> None:
        """Rows that have ended leave; their groups are complete with the last of them."""
        for row in self.live[~going]:
            self.over[row] = True
            group = int(self.groups[row])
            self.left[group] -= 1
            if not self.left[group]:
                self.ended.append(group)
        kept = torch.from_numpy(np.flatnonzero(going)).to(self.model.device)
        if not len(kept):
            self.live, self.logits = self.live[:0], None
            self.cache = EnteredCache(self.room, self.model.device)
            self.attention = DecodeAttention(self.cache)
            return
        order = torch.argsort(self.cache.leave(kept))
        kept = kept[order]
        self.live, self.drawn = self.live[kept.cpu().numpy()], self.drawn[kept]

    def _forward(self) -> None:
        """The logits after the tokens just drawn."""
        cache = self.cache
        cache.advance()
        filled = self.drawn.new_zeros(cache.rows)
        filled[: cache.live] = self.drawn
        logits = self.model.logits(filled, cache.lengths, self.attention, None)
        cache.close()
        self.logits = logits[: cache.live]
        self.passes += 1

    def _result(self) -> Advanced:
        """What all rows have got, on the CPU; raises NumericsError E652 for logits not finite."""
        sizes = torch.from_numpy(self.got)
        by_row = torch.from_numpy(np.argsort(np.concatenate(self.taken), kind="stable"))
        log_probs = torch.cat(self.log_probs).cpu()[by_row]
        require_finite(log_probs)
        return Advanced(
            response_tokens=ragged(torch.cat(self.tokens).cpu()[by_row], sizes),
            log_probs=ragged(log_probs, sizes),
            finished=self.finished,
            over=self.over,
            begun=frozenset(self.begun),
            ended=tuple(self.ended),
            turns=self.turns,
        )
