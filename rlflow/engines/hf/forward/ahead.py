"""The next micro-batch cut, packed and brought to its device while the present one computes.

A thread beside does it, one micro-batch ahead; on CUDA its copies go by pinned memory and a stream
of their own, so that they wait for no layer, and two micro-batches lie on the device at the most.
This file knows neither models nor losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from rlflow.batch import Batch, flat, to_device
from rlflow.engines.hf.forward.packed import PackedLayout, pack
from rlflow.engines.hf.layers import side_stream

Part = tuple[Tensor | None, Batch]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A micro-batch on its device: where its tokens lie, and those of its responses, int64."""

    layout: PackedLayout
    responses: Tensor


def rows_on_device(batch: Batch, device: torch.device) -> PackedRows:
    """Pack the rows of a batch and bring them to a device."""
    responses = batch["response_tokens"]
    layout = pack(batch["prompt_tokens"], responses, device)
    return PackedRows(layout, to_device(flat(responses), device))


class PackingAhead:
    """Micro-batches in their order; the rows of the next are packed meanwhile, if `beside`.

    Else rows are packed when they are asked for. Both give the same tensors. None is true on CUDA
    devices that are there: where one is only stood for, its tensors belong to one thread.
    """

    def __init__(self, device: torch.device, *, beside: bool | None = None) -> None:
        self.device = device
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
        return rows_on_device(batch, self.device)

    def _next(
        self, source: Iterator[Part]
    ) -> tuple[Part, PackedRows, torch.cuda.Event | None] | None:
        part = next(source, None)
        if part is None:
            return None
        if self.stream is None:
            return part, rows_on_device(part[1], self.device), None
        with torch.cuda.stream(self.stream):
            return part, rows_on_device(part[1], self.device), self.stream.record_event()

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
