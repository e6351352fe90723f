"""Numbers of an optimizer that are kept in host memory, or in fewer bits than they are changed in.

ZeRO-Offload (Ren et al., arXiv:2101.06840) keeps moments on the host and updates there; here they
are brought to the device a piece at a time, updated by its kernel, and taken back. On CUDA three
pieces are under way: one comes, one is computed with, one leaves. Of numbers in bfloat16 a piece is
made wide, changed, and rounded. This file knows no formula of an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.engines import pinned
from rlflow.modelfiles.visits import PIECE_NUMBERS, SLOTS

Range = tuple[int, int]


def pieces_of(start: int, stop: int) -> list[Range]:
    """Neighbouring ranges of at most `PIECE_NUMBERS` numbers, from start to stop."""
    most = PIECE_NUMBERS
    return [(first, min(first + most, stop)) for first in range(start, stop, most)]


@dataclass(slots=True)
class _Slot:
    """One piece on the device, by kind; what has to be over before it is used, or filled anew."""

    tensors: dict[str, Tensor]
    arrived: Any = None
    left: Any = None


class KeptStates:
    """Flat buffers of `count` numbers each, one a kind with its dtype, zero at first.

    They are `on_host`, or on the device.
    """

    def __init__(
        self,
        kinds: Mapping[str, torch.dtype],
        count: int,
        device: torch.device,
        *,
        on_host: bool = True,
    ) -> None:
        self.device = device
        self.on_host = on_host
        self.buffers = {
            kind: pinned.host_zeros(count, dtype, device)
            if on_host
            else torch.zeros(count, dtype=dtype, device=device)
            for kind, dtype in kinds.items()
        }

    def visits(
        self, ranges: Sequence[Range], dtype: torch.dtype, turn: int = 0
    ) -> Iterator[tuple[Range, dict[str, Tensor]]]:
        """Each range with its numbers of every kind on the device as `dtype`, to be changed.

        They are where they are kept when the iterator ends, rounded as `rounded` does in that
        `turn`. Ranges do not overlap.
        """
        for where, held in self.brought(ranges):
            wide = {kind: kept.to(dtype) for kind, kept in held.items()}
            yield where, wide
            for kind, kept in held.items():
                if kept.dtype != dtype:
                    kept.copy_(rounded(wide[kind], turn))

    def brought(self, ranges: Sequence[Range]) -> Iterator[tuple[Range, dict[str, Tensor]]]:
        """Each range with its numbers as they are kept, on the device."""
        if not self.on_host:
            for start, stop in ranges:
                yield (start, stop), {kind: b[start:stop] for kind, b in self._items()}
            return
        if not ranges:
            return
        most = max(stop - start for start, stop in ranges)
        slots = [self._slot(most) for _ in range(min(SLOTS, len(ranges)))]
        lanes = _Lanes(self.device)
        try:
            self._bring(lanes, slots[0], ranges[0])
            for number, where in enumerate(ranges):
                slot = slots[number % len(slots)]
                if number + 1 < len(ranges):
                    following = slots[(number + 1) % len(slots)]
                    self._bring(lanes, following, ranges[number + 1])
                lanes.await_arrival(slot)
                size = where[1] - where[0]
                yield where, {kind: held[:size] for kind, held in slot.tensors.items()}
                self._take(lanes, slot, where)
        finally:
            lanes.settle()

    def _slot(self, most: int) -> _Slot:
        made = {k: torch.empty(most, dtype=b.dtype, device=self.device) for k, b in self._items()}
        return _Slot(tensors=made)

    def _items(self) -> list[tuple[str, Tensor]]:
        return list(self.buffers.items())

    def _bring(self, lanes: _Lanes, slot: _Slot, where: Range) -> None:
        """Copy a range to the device, once what was in its slot has left."""
        start, stop = where
        with lanes.coming(slot):
            for kind, buffer in self._items():
                slot.tensors[kind][: stop - start].copy_(buffer[start:stop], non_blocking=True)

    def _take(self, lanes: _Lanes, slot: _Slot, where: Range) -> None:
        """Copy a range back, once what is queued on it has been computed."""
        start, stop = where
        with lanes.leaving(slot):
            for kind, buffer in self._items():
                buffer[start:stop].copy_(slot.tensors[kind][: stop - start], non_blocking=True)


class _Lanes:
    """Copies beside the compute of a CUDA device, a stream for each way; elsewhere in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            self.inward, self.outward = streams(device)
            # Slots are made of memory that queued work may still use.
            self.inward.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def coming(self, slot: _Slot) -> Iterator[None]:
        """Copies to the device in the block; they begin when the slot is free."""
        if not self.on_cuda:
            yield
            return
        if slot.left is not None:
            self.inward.wait_event(slot.left)
        with torch.cuda.stream(self.inward):
            yield
        slot.arrived = self.inward.record_event()

    @contextmanager
    def leaving(self, slot: _Slot) -> Iterator[None]:
        """Copies to the host in the block; they begin after what is queued so far."""
        if not self.on_cuda:
            yield
            return
        self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward):
            yield
        slot.left = self.outward.record_event()

    def await_arrival(self, slot: _Slot) -> None:
        """What is queued from now on begins when the slot is filled."""
        if self.on_cuda:
            torch.cuda.current_stream(self.device).wait_event(slot.arrived)

    def settle(self) -> None:
        """No copy is under way: memory may be read on the host, and given back on the device."""
        if self.on_cuda:
            self.inward.synchronize()
            self.outward.synchronize()


def rounded(wide: Tensor, turn: int) -> Tensor:
    """Numbers in bfloat16, each up or down by chance, in expectation what it is.

    Rounded to the nearest, a second moment with a decay of 0.999 would never fall: a thousandth of
    it is less than half of what two neighbours differ by (stochastic rounding: Gupta et al. 2015,
    arXiv:1502.02551; for training in bfloat16 Zamirai et al. 2020, arXiv:2010.06192). The chance is
    a hash of the number and the `turn` (the finalizer of MurmurHash3): the same on every layout and
    in every repetition.
    """
    bits = wide.float().view(torch.int32)
    chance = bits ^ ((turn * 40503 + 1) * 2654435 & 0x7FFFFFFF)
    for shift, factor in ((16, -2048144789), (13, -1028477387)):
        chance ^= (chance >> shift) & (0xFFFFFFFF >> shift)
        chance *= factor
    chance ^= chance >> 16
    chance &= 0xFFFF
    return chance.add_(bits).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


@functools.cache
def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a CUDA device on which pieces come, and leave."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
