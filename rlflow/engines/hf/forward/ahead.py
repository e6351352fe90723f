"""The next micro-batch cut, packed and brought to its device while the present one computes.

A thread beside does it, one micro-batch ahead; on CUDA its copies go by pinned memory and a stream
of their own, so that they wait for no layer, and two micro-batches lie on the device at the most.
This file knows neither models nor losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlflow.batch import Batch, flat, to_device
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.packed import PackedLayout, pack
from rlflow.engines.hf.forward.prefixes import Index
from rlflow.engines.hf.layers import side_stream
from rlflow.engines.hf.microbatches import chosen_ids
from rlflow.engines.hf.pictures.passes import SeenPictures, attending_both_ways, seen_pictures
from rlflow.graph.fields import PICTURES, PIXELS
from rlflow.modelfiles.pictures.sights import Sight

Part = tuple[Tensor | None, Batch]


class SharedRows(Protocol):
    """How the tokens of rows lie apart on several ranks, all of which have the same rows."""

    @property
    def dense(self) -> bool | None:
        """How rows are packed, see `pack`."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    def part_of(self, whole: PackedLayout) -> PackedLayout:
        """The part of a layout that is on this rank."""

    def flat_tokens_in(self, part: PackedLayout) -> Index:
        """Which of all flat tokens a part has, int64; -1 for what only fills it up."""

    def attention(self, layout: PackedLayout, routing: object) -> PackedAttention:
        """What a pass over a part runs under."""

    def joined(self, own: Tensor, layout: PackedLayout) -> Tensor:
        """What all ranks predict, in the order of the rows, of what this one does."""

    def of_all_tokens(self, own: Tensor, layout: PackedLayout) -> Tensor:
        """Whole numbers of all flat tokens, of those of this rank's."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A micro-batch on its device: where its tokens lie, and those of its responses, int64.

    `ids [predictions, k]` are those at which log-probs are asked for, if any.
    And the pictures of its prompts, where they may have some.
    """

    layout: PackedLayout
    responses: Tensor
    ids: Tensor | None
    pictures: SeenPictures | None = None


def rows_on_device(
    batch: Batch, device: torch.device, shared: SharedRows | None, sight: Sight | None = None
) -> PackedRows:
    """Pack the rows of a batch, or of `shared` ones this rank's part; bring them to a device.

    They are for a model of such a `sight`.
    """
    prompts, tokens, ids = batch["prompt_tokens"], batch["response_tokens"], chosen_ids(batch)
    responses = to_device(flat(tokens), device)
    dense, sees = None if shared is None else shared.dense, sight is not None and PIXELS in batch
    dense = True if sees and sight is not None and sight.sees == "soft" else dense
    pixels = batch[PIXELS] if sees else None
    layout, pictures, own = pack(prompts, tokens, device, pixels=pixels, dense=dense), None, None
    whole = layout
    if sight is not None and pixels is not None:
        whole = layout = attending_both_ways(sight, layout, prompts, pixels, batch[PICTURES])
    if shared is not None:
        layout = shared.part_of(whole)
        own, responses = shared.flat_tokens_in(layout), layout.predicted(responses)
        ids = None if ids is None else layout.predicted(to_device(ids, device))
    if sight is not None and pixels is not None:
        pictures = seen_pictures(sight, whole, prompts, pixels, batch[PICTURES], device, own)
    return PackedRows(layout, responses, ids, pictures)


class PackingAhead:
    """Micro-batches in their order; the rows of the next are packed meanwhile, if `beside`.

    Else rows are packed when they are asked for. Both give the same tensors. None is true on CUDA
    devices that are there: where one is only stood for, its tensors belong to one thread.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        beside: bool | None = None,
        shared: SharedRows | None = None,
        sight: Sight | None = None,
    ) -> None:
        self.device = device
        self.shared = shared
        self.sight = sight
        there = device.type == "cuda" and torch.cuda.is_available()
        self.beside = there if beside is None else beside
        self.stream = side_stream(device) if self.beside else None
        self._here: tuple[Batch, PackedRows] | None = None

    def over(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The parts as they come; what packing one of them raises is raised where it is due."""
        if not self.beside:
            yield from parts
            return
        source = iter(parts)
        with ThreadPoolExecutor(1, thread_name_prefix="packing") as pool:
            coming = pool.submit(self._next, source)
            while (found := coming.result()) is not None:
                coming = pool.submit(self._next, source)
                part, rows, arrived = found
                if arrived is not None:
                    self._receive(rows, arrived)
                self._here = part[1], rows
                yield part
                self._here = None

    def rows(self, batch: Batch) -> PackedRows:
        """The rows of a batch, packed ahead if it is the present part."""
        if self._here is not None and self._here[0] is batch:
            return self._here[1]
        return self._packed(batch)

    def _next(
        self, source: Iterator[Part]
    ) -> tuple[Part, PackedRows, torch.cuda.Event | None] | None:
        part = next(source, None)
        if part is None:
            return None
        if self.stream is None:
            return part, self._packed(part[1]), None
        with torch.cuda.stream(self.stream):
            return part, self._packed(part[1]), self.stream.record_event()

    def _packed(self, batch: Batch) -> PackedRows:
        return rows_on_device(batch, self.device, self.shared, self.sight)

    def _receive(self, rows: PackedRows, arrived: torch.cuda.Event) -> None:
        """Let later work begin when rows are there; their memory stays until it is done."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        for tensor in tensors_within(rows):
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)


def tensors_within(value: object) -> Iterator[Tensor]:
    """All tensors of a value of dataclasses, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for each in fields(value):
            yield from tensors_within(getattr(value, each.name))
    elif isinstance(value, (tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(part)
