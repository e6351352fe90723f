"""The pictures of one pass of a model: which flat tokens stand for them, and what it is given.

A packed pass has each prompt once, so each prompt's pictures once, in the order of the flat
tokens. Where tokens have positions of time, height and width, those of a picture are its rows and
columns, and the text behind it goes on from the larger (Qwen2-VL, arXiv:2409.12191, section 2.1).
This file knows neither layers nor losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import flat, lengths, offsets, select_field, shared_parts, to_device
from rlflow.contract.pictures import Pictures
from rlflow.engines.hf.forward.packed import Block, PackedLayout
from rlflow.errors import Finding, RunError
from rlflow.modelfiles.pictures.sights import CHANNELS, Sight

Index = NDArray[np.int64]
NOBODYS = -1
"""The picture of a token that stands for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPictures:
    """What a pass of a model is given of pictures, on its device.

    `places` int64 are the flat tokens that stand for them, `inputs` what its forward takes by
    name. Of what a tower makes of these the tokens stand for `features` int64, None for all of it.
    `positions` int64 `[3, tokens]` are those of time, height and width, None where there is one;
    `shifts` int64 `[groups]` how much further the text after each prompt's pictures stands.
    """

    places: Tensor
    features: Tensor | None
    inputs: Mapping[str, Tensor]
    positions: Tensor | None
    shifts: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """Where pictures stand: flat `places`, whose pixels and shapes these are, and the picture."""

    places: Index
    pixels: Index
    shapes: Index
    picture: Index


def seen_pictures(
    sight: Sight,
    layout: PackedLayout,
    prompt_tokens: Tensor,
    pixels: Tensor,
    shapes: Tensor,
    device: torch.device,
    own: Index | None = None,
) -> SeenPictures:
    """The pictures of a layout's prompts; of none at all a blank one that no token stands for.

    With it every rank passes its tower. A rank that has its `own` flat tokens of a layout, or
    NOBODYS, sees the pictures of those. Raises RunError where prompts have other tokens than
    pictures.
    """
    standing, features = _standing(sight, layout, prompt_tokens, pixels, shapes), None
    if own is not None:
        standing, found = _of_own(standing, own)
        features = to_device(torch.from_numpy(found), device)
    values, kinds = flat_values(pixels)[standing.pixels], flat_values(shapes)[standing.shapes]
    if not len(kinds):
        values, kinds = blank(sight)
    positions = shifts = None
    if sight.turns:
        turned, moved = _turned(sight, layout, prompt_tokens, shapes)
        turned = turned if own is None else turned[:, np.maximum(own, 0)]
        positions, shifts = (to_device(torch.from_numpy(each), device) for each in (turned, moved))
    inputs = forward_inputs(sight, values, kinds)
    return SeenPictures(
        places=to_device(torch.from_numpy(standing.places), device),
        features=features,
        inputs={name: to_device(each, device) for name, each in inputs.items()},
        positions=positions,
        shifts=shifts,
    )


def picture_tokens(sight: Sight, shapes: Tensor) -> Tensor:
    """How many tokens stand for parts of each picture, of int64 `shapes [pictures, 3]`."""
    if sight.sees == "grid":
        return shapes.prod(-1) // sight.merge**2
    if sight.sees == "rows":
        return (shapes[:, 1:] // sight.side).prod(-1)
    return shapes[:, 0] * sight.each


def pictures_of_rows(pictures: Pictures | None, rows: Tensor) -> Pictures | None:
    """The pictures of some prompts; None where there are none."""
    if pictures is None:
        return None
    return Pictures(
        pixels=select_field(pictures.pixels, rows),
        shapes=select_field(pictures.shapes, rows),
        encoded=select_field(pictures.encoded, rows),
    )


def flat_values(field: Tensor) -> Tensor:
    """The values of a field as they lie, whether rows share them or not."""
    return shared_parts(field)[0]


def _standing(
    sight: Sight, layout: PackedLayout, prompt_tokens: Tensor, pixels: Tensor, shapes: Tensor
) -> _Standing:
    assert layout.rows is not None
    tokens, bounds = _prompts(prompt_tokens)
    source = layout.rows.source
    part = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum(tokens == sight.token, out=part[1:])
    own = np.flatnonzero(source < len(tokens))
    places = own[tokens[source[own]] == sight.token]
    row = np.searchsorted(bounds, source[places], side="right") - 1
    number = part[source[places]] - part[bounds[row]]
    _require_pixels(np.unique(row), np.diff(part[bounds]), pixels)
    kinds, first, _ = shared_parts(shapes)
    ends = np.concatenate([[0], np.cumsum(picture_tokens(sight, kinds).numpy())])
    which = np.searchsorted(ends, ends[first.numpy()[row]] + number, side="right") - 1
    changed = np.diff(row * len(ends) + which, prepend=NOBODYS) != 0
    picture = np.full(len(source), NOBODYS, dtype=np.int64)
    picture[places] = np.cumsum(changed)
    return _Standing(
        places=places,
        pixels=shared_parts(pixels)[1].numpy()[row] + number,
        shapes=which[changed],
        picture=picture,
    )


def _of_own(standing: _Standing, own: Index) -> tuple[_Standing, Index]:
    """Pictures some of whose tokens are among its `own`, and which of all of theirs those are."""
    picture, size = standing.picture, len(standing.picture)
    there = (own >= 0) & (own < size)
    mine = np.full(len(own), NOBODYS, dtype=np.int64)
    mine[there] = picture[own[there]]
    places = np.flatnonzero(mine != NOBODYS)
    seen = np.unique(mine[places])
    kept = np.isin(picture[standing.places], seen)
    number = np.zeros(size, dtype=np.int64)
    number[standing.places] = np.cumsum(kept) - 1
    part = _Standing(
        places=places,
        pixels=standing.pixels[kept],
        shapes=standing.shapes[seen - 1],  # Pictures are counted from 1.
        picture=mine,
    )
    return part, number[own[places]]


def _prompts(prompt_tokens: Tensor) -> tuple[Index, Index]:
    """The tokens of prompts, flat, and where each begins and the last one ends."""
    return flat(prompt_tokens).cpu().numpy(), offsets(prompt_tokens).cpu().numpy()


def _require_pixels(rows: Index, parts: Index, pixels: Tensor) -> None:
    """Raise RunError (E552) where a prompt has other parts of pictures than pixels."""
    sizes = lengths(pixels).numpy()
    wrong = [row for row in rows.tolist() if parts[row] != sizes[row]]
    if wrong:
        row = wrong[0]
        raise RunError(
            Finding(
                code="E552",
                what=f"the prompt of row {row} stands for other pictures than it comes with",
                got=f"{parts[row]} tokens of pictures, and pixels of {sizes[row]}",
                expected="prompts and pictures that one model's processor has made",
            )
        )


def _turned(
    sight: Sight, layout: PackedLayout, prompt_tokens: Tensor, shapes: Tensor
) -> tuple[Index, Index]:
    """Positions `[3, tokens]` of a layout, and the shift of each group's text after pictures."""
    order = layout.rows
    assert order is not None
    tokens, bounds = _prompts(prompt_tokens)
    kinds, first, count = (each.numpy() for each in shared_parts(shapes))
    found = np.zeros((3, len(layout.tokens)), dtype=np.int64)
    found[:, : len(order.positions)] = order.positions
    shifts = np.zeros(len(order.group_start), dtype=np.int64)
    for group, start in enumerate(order.group_start.tolist()):
        row = int(np.searchsorted(bounds, order.source[start], side="right")) - 1
        own = tokens[bounds[row] : bounds[row + 1]]
        seen = kinds[first[row] : first[row] + count[row]]
        turned = turned_positions(own, sight.token, seen, sight.merge)
        found[:, start : start + len(own)] = turned
        shifts[group] = int(turned.max()) + 1 - len(own)
    own_tokens = np.repeat(shifts[order.row_group], order.row_length)
    begun = np.cumsum(order.row_length) - order.row_length
    within = np.arange(len(own_tokens)) - np.repeat(begun, order.row_length)
    found[:, np.repeat(order.row_start, order.row_length) + within] += own_tokens
    return found, shifts


def turned_positions(tokens: Index, part: int, shapes: Index, merge: int) -> Index:
    """Positions of time, height and width `[3, tokens]` of a prompt's tokens.

    A picture of `shapes [pictures, 3]` patches is a grid of tokens of `merge` patches a side.
    """
    found = np.empty((3, len(tokens)), dtype=np.int64)
    place = position = 0
    seen = iter(shapes.tolist())
    while place < len(tokens):
        if tokens[place] != part:
            ahead = np.flatnonzero(tokens[place:] == part)
            stop = place + int(ahead[0]) if len(ahead) else len(tokens)
            found[:, place:stop] = position + np.arange(stop - place)
            place, position = stop, position + stop - place
            continue
        frames, rows, columns = next(seen)
        grid = np.indices((frames, rows // merge, columns // merge)).reshape(3, -1)
        found[:, place : place + grid.shape[1]] = position + grid
        place += grid.shape[1]
        position += max(rows, columns) // merge
    return found


def forward_inputs(sight: Sight, pixels: Tensor, shapes: Tensor) -> dict[str, Tensor]:
    """What a family's forward takes for pixels `[tokens, numbers]` of pictures of such shapes."""
    if sight.sees == "grid":
        patches = pixels.reshape(-1, sight.numbers // sight.merge**2)
        return {"pixel_values": patches, "image_grid_thw": shapes}
    if sight.sees == "rows":
        sizes = shapes[:, 1:]
        high, wide = sizes.max(0).values.tolist()
        padded = pixels.new_zeros(len(shapes), CHANNELS, high, wide)
        parts = torch.split(pixels, picture_tokens(sight, shapes).tolist())
        for picture, (part, (rows, columns)) in enumerate(zip(parts, sizes.tolist(), strict=True)):
            padded[picture, :, :rows, :columns] = part.reshape(CHANNELS, rows, columns)
        return {"pixel_values": padded, "image_sizes": sizes}
    tile = CHANNELS * sight.side**2
    tiles = pixels.reshape(-1, sight.each * sight.numbers)[:, :tile]
    return {"pixel_values": tiles.reshape(-1, CHANNELS, sight.side, sight.side)}


def blank(sight: Sight) -> tuple[Tensor, Tensor]:
    """Pixels and shape of a small picture, all zero."""
    if sight.sees == "grid":
        shape = [1, sight.merge, sight.merge]
    else:
        # Of a picture of one token transformers' Mistral 3 drops the dimension of tokens.
        shape = [1, sight.side, sight.side * (1 + (sight.sees == "rows"))]
    shapes = torch.tensor([shape])
    return torch.zeros(int(picture_tokens(sight, shapes)), sight.numbers), shapes


def with_pictures_in(
    sight: Sight, layout: PackedLayout, prompt_tokens: Tensor, pixels: Tensor, shapes: Tensor
) -> tuple[PackedLayout, SeenPictures]:
    """A layout as a family attends in it, and the pictures of its prompts on its device."""
    of = (prompt_tokens, pixels, shapes)
    seen = seen_pictures(sight, layout, *of, layout.tokens.device)
    return attending_both_ways(sight, layout, *of), seen


def attending_both_ways(
    sight: Sight, layout: PackedLayout, prompt_tokens: Tensor, pixels: Tensor, shapes: Tensor
) -> PackedLayout:
    """A layout as a family attends in it."""
    if sight.sees != "soft":
        return layout
    return seeing_both_ways(sight, layout, prompt_tokens, pixels, shapes)


def seeing_both_ways(
    sight: Sight,
    layout: PackedLayout,
    prompt_tokens: Tensor,
    pixels: Tensor,
    shapes: Tensor,
) -> PackedLayout:
    """The layout in which tokens of one picture see each other; it has to be a dense one."""
    picture = torch.from_numpy(_standing(sight, layout, prompt_tokens, pixels, shapes).picture)
    filled = torch.nn.functional.pad(picture, (0, len(layout.tokens) - len(picture)), value=NOBODYS)
    picture = to_device(filled, layout.tokens.device)
    return replace(layout, blocks=tuple(_both_ways(block, picture) for block in layout.blocks))


def _both_ways(block: Block, picture: Tensor) -> Block:
    queries, keys = (
        _pictures_in(block, picture, *side)
        for side in ((block.q_index, block.q_positions), (block.kv_index, block.kv_positions))
    )
    together = (queries[:, :, None] == keys[:, None, :]) & (queries >= 0)[:, :, None]
    return replace(block, mask=block.mask | together, together=together)


def _pictures_in(block: Block, picture: Tensor, index: Tensor | None, positions: Tensor) -> Tensor:
    """The picture of every place of a block, `[size, places]`; of one that fills up nobody's.

    Tokens of a prompt stand at the places of their positions, what fills up at others.
    """
    size, places = positions.shape
    found = picture[: size * places] if index is None else picture[index]
    real = positions == torch.arange(places, device=positions.device)
    return torch.where(real, found.view(size, places), NOBODYS)
