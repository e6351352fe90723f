"""Generation on a pool of blocks, in windows of steps between which the host changes the rows.

After every `LOOK` tokens the host puts rows into slots: it takes out those that had ended one
window before, lets others begin, and sets the last ones aside in host memory where the pool is
full. What it reads is a window old, so the device has work while it does. This file knows neither
engines nor how a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import select_field, to_device
from rlflow.contract.pictures import Pictures
from rlflow.engines.hf.generate.decoding import Decoding, Responses, packed_prompts, prefill
from rlflow.engines.hf.generate.graphs import Record, Replays
from rlflow.engines.hf.generate.paged import PagedCache, RowBlocks
from rlflow.engines.hf.generate.rng import uniforms
from rlflow.engines.hf.generate.stepped import Look, Numbers, Places, SteppedRows
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.pictures.passes import pictures_of_rows
from rlflow.modelfiles.paging import (
    BLOCK,
    LOOK,
    MOST_ROWS,
    blocks_for,
    bucket,
    first_blocks,
    own_blocks,
    pool_blocks,
    rows_at_once,
)


class PagedDecoding(Decoding):
    """Every row in a slot draws one token a step; the pool lives as long as the generation does.

    `prompts` is ragged int64 `[prompts, j]` with lengths `sizes`; all rows of a prompt begin
    together, at most `at_once` rows. `blocks` are those of the pool, by default what `pool_blocks`
    says; `record` makes replays of steps, None runs each as it is.
    """

    def __init__(
        self,
        model: TorchModel,
        prompts: Tensor,
        sizes: Tensor,
        responses: Responses,
        stopped: Callable[[], bool],
        record: Record | None,
        blocks: int | None = None,
        at_once: int = MOST_ROWS,
        pictures: Pictures | None = None,
    ) -> None:
        super().__init__(responses, stopped)
        self.model = model
        self.prompts = prompts
        self.pictures = pictures
        self.n = responses.sampling.n
        self.width = responses.tokens.shape[1]
        self.sizes: Places = sizes.cpu().numpy().astype(np.int64)
        self.lengths = self.sizes.repeat(self.n)
        rows, most = len(self.lengths), blocks_for(int(self.sizes.max()) + self.width)
        self.at_once = rows_at_once(rows, self.n, at_once)
        blocks = blocks or pool_blocks(self.sizes.tolist(), self.n, self.width, at_once)
        self.held = RowBlocks(blocks, rows, self.n, most)
        self.unshared = blocks - 1
        self.reserve = max(own_blocks(int(size), self.width) for size in self.sizes)
        self.cache = PagedCache(blocks, bucket(self.at_once), most, model.device, rows)
        self.state: SteppedRows | None = SteppedRows(
            model, responses, self.lengths, bucket(self.at_once), self.cache
        )
        self.replays = Replays(record, self.addresses)
        # Tokens that a row has if it has not ended; and what was last read of how many it has.
        self.made: Places = np.zeros(rows, dtype=np.int64)
        self.known: Places = np.zeros(rows, dtype=np.int64)
        self.looks: deque[Look] = deque()
        self.waiting = deque(range(len(self.sizes)))
        self.running: list[int] = []
        self.aside: dict[int, list[Tensor]] = {}

    def step(self) -> bool:
        """Make a window of steps; whether any row goes on."""
        state = self.state
        if state is None:
            return False
        while len(self.looks) > 1:
            self._learn()
        self._arrange(state)
        while not self.running and self.looks:
            self._learn()
            self._arrange(state)
        if not self.running:
            return self._end()
        times = min(LOOK, max(self.width - int(self.made[row]) for row in self.running))
        if times:
            self._window(state, times)
        self.looks.append(state.look())
        return self._end() if self.stopped() else True

    def _window(self, state: SteppedRows, times: int) -> None:
        """Make so many steps of the rows that are running."""
        rows = np.array(self.running, dtype=np.int64)
        size = bucket(len(rows))
        longest = int((self.lengths[rows] + np.minimum(self.made[rows] + times, self.width)).max())
        width = min(bucket(blocks_for(longest)), self.held.table.shape[1])
        state.place(rows, self.held.table[rows, :width], self.numbers(rows, times), size)
        self.replays.play((size, width), partial(state.step, size, width), times)
        self.made[rows] += times
        self.passes += times

    def _learn(self) -> None:
        """Read the oldest look; responses know which rows had not ended then."""
        found = self.looks.popleft().read()
        self.known, said = np.split(found, [len(self.lengths)])
        if len(said):
            self.responses.heard(bool(said[0]))
        going = torch.from_numpy(np.flatnonzero(self.known >= 0))
        self.responses.live = to_device(going, self.model.device)

    def _arrange(self, state: SteppedRows) -> None:
        """Take out rows that have ended, see that the others have blocks, and let more begin."""
        over = (self.known < 0) | (self.made >= self.width)
        for row in [row for row in self.running if over[row]]:
            self.running.remove(row)
            self._leave(row)
        for row in [row for row in self.aside if over[row]]:
            del self.aside[row]
            self._leave(row)
        if self._make_room():
            return
        while self.aside and self._fits(self._lacking(row := min(self.aside))):
            self._bring_back(row)
        began: list[int] = []
        while self.waiting and not self.aside and self._may_begin(self.waiting[0]):
            began.append(self._take(self.waiting.popleft()))
        if began:
            self._begin(state, began)

    def _leave(self, row: int) -> None:
        """A row has ended: its blocks are free, and its prompt's with the last of its rows."""
        self.held.end(row)
        if not self.held.sharing[row // self.n]:
            self.unshared += int(self.held.shared[row])

    def _make_room(self) -> bool:
        """Give running rows blocks for a window; whether some were set aside for that, the last."""
        missing = {row: self.held.missing(row, self._room(row)) for row in self.running}
        moved = False
        while sum(missing.values()) > len(self.held.free):
            row = self.running.pop()
            missing.pop(row)
            self.aside[row] = self.cache.take_out(self.held.own(row))
            self.held.set_aside(row)
            moved = True
        for row in self.running:
            self.held.extend(row, self._room(row))
        return moved

    def _bring_back(self, row: int) -> None:
        """Give a row that was set aside blocks again, with what was in them."""
        copies = self.aside.pop(row)
        self.held.extend(row, self._room(row))
        self.cache.put_back(self.held.own(row)[: len(copies[0])], copies)
        self.running.append(row)
        self.running.sort()

    def _room(self, row: int) -> int:
        """The tokens that a row may have after a window, prompt included."""
        return int(self.lengths[row] + min(self.made[row] + LOOK, self.width))

    def _lacking(self, row: int) -> int:
        """Blocks that a row needs for a window."""
        return self.held.missing(row, self._room(row))

    def _fits(self, blocks: int) -> bool:
        """Whether so many are free, and one for each running row that may want more.

        Or nothing else runs: what is there then is enough.
        """
        if not self.running:
            return True
        wanting = sum(
            self.held.missing(row, int(self.lengths[row]) + self.width) > 0 for row in self.running
        )
        return len(self.held.free) >= blocks + wanting

    def _may_begin(self, prompt: int) -> bool:
        """Whether there are slots and blocks for a prompt's rows, and one could still end."""
        size = int(self.sizes[prompt])
        whole, own = size // BLOCK, first_blocks(size, self.width)
        slots = len(self.running) + self.n <= self.at_once
        left = self.unshared - whole >= self.reserve
        return slots and left and self._fits(whole + self.n * own)

    def _take(self, prompt: int) -> int:
        """Give a prompt's rows blocks for their first window."""
        size = int(self.sizes[prompt])
        whole = size // BLOCK
        self.unshared -= whole
        self.held.begin(prompt, whole)
        for row in range(prompt * self.n, (prompt + 1) * self.n):
            self.held.extend(row, self._room(row))
            self.running.append(row)
        return prompt

    def _begin(self, state: SteppedRows, prompts: list[int]) -> None:
        """Read prompts and draw the first token of their rows."""
        self.cache.expect(prompts, self.sizes, self.held)
        chosen = torch.tensor(prompts)
        own = select_field(self.prompts, chosen)
        layout, seen = packed_prompts(self.model, own, pictures_of_rows(self.pictures, chosen))
        logits = prefill(self.model, self.cache, layout, layout.targets, seen=seen)
        logits = logits[: layout.predictions]
        rows = (np.array(prompts)[:, None] * self.n + np.arange(self.n)).reshape(-1)
        if seen is not None and seen.shifts is not None:
            state.shifts[torch.from_numpy(rows)] = seen.shifts.repeat_interleave(self.n)
        state.begin(rows, logits.repeat_interleave(self.n, 0), self.numbers(rows, 1)[:, 0])
        self.made[rows] = 1

    def numbers(self, rows: Places, count: int) -> Numbers:
        """The random numbers of rows for their next tokens, float64 `[rows, count]`."""
        if self.responses.sampling.temperature == 0:
            return np.zeros((len(rows), count))
        key, first = self.responses.key, self.responses.first + self.made[rows]
        ids = self.responses.ids[rows]
        return uniforms(key.seed, key.iteration, key.stream, ids, count, first=first)

    def addresses(self) -> tuple[int, ...]:
        """Where the weights and the pools lie, which a replay reads."""
        pools = [part for parts in self.cache.pools.values() for part in parts]
        pools += [each for held in self.cache.states.values() for each in held.values()]
        return tuple(part.data_ptr() for part in (*self.model.computed_with(), *pools))

    def settled(self) -> int:
        """The rows that had ended when last looked, and were no longer than any that went on."""
        if self.state is None:
            return len(self.known)
        going = self.known >= 0
        least = self.known[going].min(initial=self.width)
        return int((-self.known[~going] <= least).sum())

    def _end(self) -> bool:
        """No row goes on; the memory of the pool and of replays is given back."""
        self.responses.live = self.responses.live[:0]
        self.state = None
        self.replays = Replays(None, tuple)
        self.cache.pools, self.cache.states = {}, {}
        self.aside = {}
        return False
