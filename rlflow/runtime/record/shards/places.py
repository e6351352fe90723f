"""Where the pieces of a tensor lie within it, and which process writes each.

A checkpoint has every element once: of processes that hold the same piece one writes it. This
file reads and writes nothing, and imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.contract.values import Box
from rlflow.engines.reshard.boxes import volume, whole_box

SUFFIX = ".safetensors"
TEXT_FORM = re.compile(r"(?P<box>(\d+:\d+(,\d+:\d+)*)?) of (?P<shape>(\d+(,\d+)*)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class SavedPiece:
    """A piece of a tensor: (start, stop) a dimension within the whole tensor's shape."""

    shape: tuple[int, ...]
    box: Box

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return volume(self.box)

    @property
    def whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.box == whole_box(self.shape)

    def text(self) -> str:
        """As a manifest has it: `0:512,0:64 of 1024,64`."""
        box = ",".join(f"{start}:{stop}" for start, stop in self.box)
        return f"{box} of {','.join(map(str, self.shape))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOf:
    """What a file holds of a component: the places of its tensors, by name."""

    component: str
    pieces: Mapping[str, SavedPiece]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a component. A tensor without a place in `pieces` is whole."""

    path: Path
    pieces: Mapping[str, SavedPiece]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWrite:
    """What one process writes of a component: a file's name, and the tensors in it."""

    file: str
    names: tuple[str, ...]


Pieces = Mapping[str, SavedPiece]
Held = Mapping[int, Mapping[str, Pieces]]


def parse_piece(text: str) -> SavedPiece:
    """The place that `SavedPiece.text` says; ValueError for another text."""
    found = TEXT_FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no place of a piece")
    pairs = [pair.partition(":") for pair in found["box"].split(",") if pair]
    shape = tuple(int(size) for size in found["shape"].split(",") if size)
    return SavedPiece(shape, tuple((int(start), int(stop)) for start, _, stop in pairs))


def whole_piece(shape: Sequence[int]) -> SavedPiece:
    """All of a tensor."""
    return SavedPiece(tuple(shape), whole_box(tuple(shape)))


def assign_writers(held: Held) -> dict[int, dict[str, ToWrite]]:
    """Which file each device writes of each component, of what devices hold.

    `held` is by device, component and tensor. Every element is written once. Of devices that
    hold the same piece the one with the fewest elements so far writes it, in the order of the
    largest pieces first. A component that one device writes is one file of its name; of
    several, each has its number in its name. AssertionError where pieces do not fill a tensor.
    """
    load = dict.fromkeys(held, 0)
    written: dict[int, dict[str, ToWrite]] = {device: {} for device in held}
    for component in dict.fromkeys(name for parts in held.values() for name in parts):
        mine = _owners({d: p[component] for d, p in held.items() if component in p}, load)
        writers = [device for device in mine if mine[device]] or list(mine)[:1]
        for number, device in enumerate(writers, start=1):
            part = f"-{number:05d}-of-{len(writers):05d}" if len(writers) > 1 else ""
            names = tuple(sorted(mine[device]))
            written[device][component] = ToWrite(file=component + part + SUFFIX, names=names)
    return written


def _owners(
    held: Mapping[int, Mapping[str, SavedPiece]], load: dict[int, int]
) -> dict[int, list[str]]:
    """The tensors of a component that each device writes; counts their elements in `load`."""
    holders: dict[tuple[str, SavedPiece], list[int]] = {}
    for device, places in held.items():
        for name, place in places.items():
            holders.setdefault((name, place), []).append(device)
    _require_whole(holders)
    found: dict[int, list[str]] = {device: [] for device in held}
    for name, place in sorted(holders, key=lambda each: (-each[1].numel, each[0], each[1].box)):
        if not place.numel and not place.whole:
            continue
        owner = min(holders[name, place], key=lambda device: (load[device], device))
        load[owner] += place.numel
        found[owner].append(name)
    return found


def _require_whole(pieces: Iterable[tuple[str, SavedPiece]]) -> None:
    counted: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, place in pieces:
        counted[name] = counted.get(name, 0) + place.numel
        sizes[name] = math.prod(place.shape)
    wrong = sorted(name for name, size in sizes.items() if counted[name] != size)
    assert not wrong, f"pieces of {wrong[0]} have {counted[wrong[0]]} of {sizes[wrong[0]]} elements"


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in a tensor that has just the elements of `outer`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, outer, strict=True)
    )
