"""The rows of a generation on their device: a step draws one token for each that is in a slot.

A step's tensors stay where they are and nothing is asked for, so it can be replayed; rows that
have ended go on without effect until the host takes them out of their slots. This file knows
neither which rows are in slots, nor why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import to_device
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.narrow import draw_narrow
from rlflow.engines.hf.generate.paged import PagedAttention, PagedCache, to_host_soon
from rlflow.engines.hf.models import TorchModel
from rlflow.modelfiles.paging import LOOK

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Look:
    """How many tokens rows have, negative of those that have ended, as it was at some time.

    One number more, where several ranks draw, is whether the first of them was told to stop.
    """

    counts: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> Places:
        """The numbers int64 `[rows]` or `[rows + 1]`, once the device is as far."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: Places = self.counts.numpy()
        return found


class SteppedRows:
    """Rows by their number, and which of them are in the `slots` of a step.

    `responses` get their tokens; one more row than they have is nobody's. `sizes` are the prompts'
    lengths int64 `[rows]`. Numbers of a window of steps are given before it.
    """

    def __init__(
        self, model: TorchModel, responses: Responses, sizes: Places, slots: int, cache: PagedCache
    ) -> None:
        self.model = model
        self.cache = cache
        self.responses = responses
        self.sampling = responses.sampling
        self.stops = responses.stops
        self.nobody, self.width = responses.tokens.shape
        rows, device = self.nobody + 1, model.device
        self.tokens = torch.zeros(rows, self.width, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last = torch.zeros_like(self.counts)
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.finished = torch.zeros_like(self.live)
        self.lengths = to_device(torch.from_numpy(np.append(sizes, 1)), device)
        # How much further than their places new tokens stand, after pictures.
        self.shifts = torch.zeros_like(self.lengths)
        self.row = torch.full((slots,), self.nobody, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(slots, LOOK, dtype=torch.float64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        mine = slice(0, self.nobody)
        responses.tokens, responses.log_probs = self.tokens[mine], self.log_probs[mine]
        responses.sizes, responses.finished = self.counts[mine], self.finished[mine]

    def begin(self, rows: Places, logits: Tensor, uniform: Numbers) -> None:
        """Draw the first token of rows, of `logits [rows, vocabulary]` after their prompts."""
        row = to_device(torch.from_numpy(rows), self.row.device)
        self.live.index_fill_(0, row, True)
        self.keep(row, logits, to_device(torch.from_numpy(uniform), row.device))

    def place(self, rows: Places, table: NDArray[np.int32], numbers: Numbers, size: int) -> None:
        """Put rows into the first `size` slots, with their blocks and numbers for a window."""
        free = size - len(rows)
        filled = np.pad(rows, (0, free), constant_values=self.nobody)
        copy_soon(self.row[:size], filled)
        copy_soon(self.cache.table[:size, : table.shape[1]], np.pad(table, ((0, free), (0, 0))))
        copy_soon(self.numbers[:size, : numbers.shape[1]], np.pad(numbers, ((0, free), (0, 0))))
        self.turn.zero_()

    def step(self, size: int, width: int) -> None:
        """Draw a token for each row in the first `size` slots, of at most `width` blocks."""
        row = self.row[:size]
        live = self.live[row]
        # A row that has ended may be longer than those of this step, whose blocks are so many.
        positions = torch.where(live, self.lengths[row] + self.counts[row] - 1, 0)
        table = self.cache.table[:size, :width]
        attention = PagedAttention(self.cache, table, positions, live, row)
        turned = positions + self.shifts[row]
        logits = self.model.logits(self.last[row], turned, attention, None)
        self.keep(row, logits, self.numbers[:size].index_select(1, self.turn)[:, 0])
        self.turn += 1

    def keep(self, row: Tensor, logits: Tensor, uniform: Tensor) -> None:
        """Draw, and note what live rows have drawn and which of them go on."""
        tokens, log_probs = self.responses.agreed(*draw_narrow(logits, uniform, self.sampling))
        live, counts = self.live[row], self.counts[row]
        # Rows that have ended write to the row that is nobody's.
        place = torch.where(live, row, self.nobody)
        column = counts.clamp(max=self.width - 1)
        ended = (tokens[:, None] == self.stops).any(-1)
        self.tokens[place, column] = tokens
        self.log_probs[place, column] = log_probs
        self.last[place] = tokens
        self.counts[place] = counts + 1
        self.finished[place] = ended
        self.live[row] = live & ~ended & (counts + 1 < self.width)

    def look(self) -> Look:
        """Begin to bring the present counts to the host."""
        mine = slice(0, self.nobody)
        counts = torch.where(self.live[mine], self.counts[mine], -self.counts[mine])
        said = self.responses.stop_said()
        counts = to_host_soon(counts if said is None else torch.cat([counts, said]))
        arrived: Any = None
        if self.row.device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Look(counts, arrived)


def copy_soon(place: Tensor, values: NDArray[Any]) -> None:
    """Copy an array into a tensor in the order of the device's work, without waiting for it."""
    given = torch.from_numpy(np.ascontiguousarray(values))
    place.copy_(given.pin_memory() if place.device.type == "cuda" else given, non_blocking=True)
