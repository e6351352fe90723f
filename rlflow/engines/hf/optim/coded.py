"""Numbers in 8 bits: codes, and a scale for each block of a row.

Dettmers et al., "8-bit optimizers via block-wise quantization" (arXiv:2110.02861): a block is
divided by its largest magnitude, and each number becomes the nearest of 256 values whose density
follows seven decades, by more of them in each larger one. All is plain torch, the same in every
repetition. This file knows no formula of an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlflow.engines import pinned
from rlflow.engines.hf.host_states import KeptStates, Range, pieces_of
from rlflow.engines.hf.optim.groups import STEP

DECADES = 7
SCALES = "_scales"


@functools.cache
def code_values(*, signed: bool, device: torch.device) -> Tensor:
    """The 256 values in rising order, float32, from -1 or 0 to 1.

    Of the decade that ends at 10^-k there are 2^(6 - k) of a sign, or twice as many without signs:
    middles of equal parts of it from a tenth up. Zero and one are beside them.
    """
    found = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade + 1 - DECADES)
        middles = [top * (0.1 + 0.9 * (place + 0.5) / count) for place in range(count)]
        found += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@functools.cache
def code_bounds(*, signed: bool, device: torch.device) -> Tensor:
    """The 255 middles between neighbouring values."""
    values = code_values(signed=signed, device=device)
    return (values[1:] + values[:-1]) / 2


def coded(values: Tensor, block: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 of `values [numbers]`, and scales float32 `[numbers / block]`.

    Without signs what is above 0 does not become 0: a step divides by its root.
    """
    rows = values.float().view(-1, block)
    scales = rows.abs().amax(1)
    parts = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    bounds = code_bounds(signed=signed, device=values.device)
    codes = torch.bucketize(parts, bounds, out_int32=True)
    if not signed:
        codes.clamp_(min=1).mul_(rows > 0)
    return codes.to(torch.uint8).view(-1), scales


def decoded(codes: Tensor, scales: Tensor, block: int, *, signed: bool) -> Tensor:
    """The numbers of codes and scales, float32 `[numbers]`."""
    values = code_values(signed=signed, device=codes.device)
    found = torch.index_select(values, 0, codes.int()).view(-1, block)
    return found.mul_(scales[:, None]).view(-1)


class CodedGroup:
    """States in 8 bits of parameters of the named `shapes`, whose rows have the named `blocks`.

    `signed` says of each kind of state whether it has signs; `beside` are kept of each number in
    `dtype`. It is stepped as a `StateGroup` of weights that decay is.
    """

    matrices = False
    decays = True

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        blocks: Mapping[str, int],
        signed: Mapping[str, bool],
        beside: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_host: bool,
    ) -> None:
        self.shapes, self.blocks, self.signed = shapes, blocks, signed
        self.dtype, self.device = dtype, device
        self.places: dict[str, Range] = {}
        self.scale_places: dict[str, Range] = {}
        end, scales = 0, 0
        for name, shape in shapes.items():
            count = shape.numel()
            self.places[name] = end, end + count
            self.scale_places[name] = scales, scales + count // blocks[name]
            end = -(-(end + count) // STEP) * STEP
            scales += count // blocks[name]
        kinds = dict.fromkeys(signed, torch.uint8) | dict.fromkeys(beside, dtype)
        self.states = KeptStates(kinds, end, device, on_host=on_host)
        self.scales = {
            kind: pinned.host_zeros(scales, torch.float32, device)
            if on_host
            else torch.zeros(scales, device=device)
            for kind in signed
        }

    def buffers(self) -> list[Tensor]:
        """Everything that is kept."""
        return [*self.states.buffers.values(), *self.scales.values()]

    def views(self, buffers: Sequence[Tensor] | None = None) -> dict[str, dict[str, Tensor]]:
        """Codes, scales and what is kept beside by kind and name; or those of other buffers."""
        flat = iter(self.buffers() if buffers is None else buffers)
        found = {
            kind: {n: buffer[slice(*self.places[n])].view(s) for n, s in self.shapes.items()}
            for kind, buffer in zip(self.states.buffers, flat, strict=False)
        }
        for kind, buffer in zip(self.scales, flat, strict=True):
            found[kind + SCALES] = {
                name: buffer[slice(*self.scale_places[name])].view(
                    *shape[:-1], shape[-1] // self.blocks[name]
                )
                for name, shape in self.shapes.items()
            }
        return found

    def by_piece(self, turn: int) -> Iterator[list[tuple[str, slice, dict[str, Tensor]]]]:
        """A range of a parameter at a time, with its states wide on the device, to be changed."""
        pieces = [(n, p) for n, place in self.places.items() for p in pieces_of(*place)]
        brought = self.states.brought([piece for _, piece in pieces])
        for (name, _), ((start, stop), held) in zip(pieces, brought, strict=True):
            first, block = self.places[name][0], self.blocks[name]
            own = slice(start - first, stop - first)
            base = self.scale_places[name][0]
            there = slice(base + own.start // block, base + own.stop // block)
            wide = dict(held)
            for kind, signed in self.signed.items():
                scales = self.scales[kind][there].to(self.device)
                wide[kind] = decoded(held[kind], scales, block, signed=signed).to(self.dtype)
            yield [(name, own, wide)]
            for kind, signed in self.signed.items():
                codes, scales = coded(wide.pop(kind), block, signed=signed)
                held[kind].copy_(codes)
                self.scales[kind][there].copy_(scales)


class OnDisk(Protocol):
    """A tensor on disk."""

    def get_shape(self) -> Sequence[int]:
        """Its shape."""

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """A box of it."""


class Recoded:
    """Codes or `scales` on disk, as they are for blocks of another size than they were made with.

    It is read as a tensor on disk is, by boxes.
    """

    def __init__(
        self, stored: tuple[OnDisk, OnDisk], block: int, *, scales: bool, signed: bool
    ) -> None:
        self.codes, self.scales = stored
        self.block, self.of_scales, self.signed = block, scales, signed
        self.before = self.codes.get_shape()[-1] // self.scales.get_shape()[-1]

    def get_shape(self) -> Sequence[int]:
        """The shape of all codes, or of all scales."""
        *rows, columns = self.codes.get_shape()
        return (*rows, columns // self.block if self.of_scales else columns)

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """A box, of numbers that are made wide and coded anew."""
        *rows, columns = box
        each = self.block if self.of_scales else 1
        start, stop = columns.start * each, columns.stop * each
        low, high = start // self.before, -(-stop // self.before)
        codes = self.codes[(*rows, slice(low * self.before, high * self.before))]
        scales = self.scales[(*rows, slice(low, high))]
        flat = codes.reshape(-1), scales.reshape(-1)
        wide = decoded(*flat, self.before, signed=self.signed).view(codes.shape)
        own = wide[..., start - low * self.before : stop - low * self.before]
        made = coded(own.reshape(-1), self.block, signed=self.signed)[self.of_scales]
        found: Tensor = made.view(*own.shape[:-1], -1)
        return found
