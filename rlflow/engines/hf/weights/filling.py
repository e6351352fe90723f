"""Filling weights where they are to lie: slices of safetensors, random numbers, adapters.

Files are mapped, not read: a piece of a tensor at a time is rounded on the host and copied to its
place. This file knows neither how a model is shared out nor what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlflow.contract.progress import advance
from rlflow.contract.values import Shard
from rlflow.engines.hf.flat import whole_shards
from rlflow.engines.hf.heads import stored_names
from rlflow.engines.hf.lora import ADDED_HEAD, DOWN, initial_down, is_adapter
from rlflow.engines.hf.weights.names import may_be_turned, names_in_file, stored_buffers, tied_names
from rlflow.engines.hf.weights.parts import StoredPart, parts_in_files
from rlflow.engines.hf.weights.random_weights import drawn_parameters
from rlflow.errors import Finding, UsageError, known_names
from rlflow.modelfiles.headers import read_header
from rlflow.modelfiles.host_memory import LOADING_PIECE

# By parameter, the tensors of files that it is made of: parts of it, or it itself.
Places = dict[str, dict[str, StoredPart | None]]
# What safetensors calls dtypes, and the bytes of their numbers; others are taken as wide ones.
FILE_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
}  # fmt: skip
FILE_BYTES = {name: dtype.itemsize for dtype, name in FILE_DTYPES.items()}


class Filled(Protocol):
    """A model that is filled: its module, and the dtype that it computes in."""

    @property
    def module(self) -> nn.Module:
        """What is computed with."""

    @property
    def dtype(self) -> torch.dtype:
        """What weights are rounded to, in whatever they are kept."""


def fill_pretrained(
    shards: Mapping[str, Shard], module: Any, path: str, dtype: torch.dtype | None
) -> None:
    """Fill shards from the weights at `path`, a directory or hub name, rounded to `dtype`.

    Without one they are rounded to what they are kept in.

    Raises UsageError where weights are missing or of another shape.
    """
    stored = stored_names(path)
    places = places_of({name: shard.shape for name, shard in shards.items()}, module, stored)
    lost = sorted(
        name for name, its in places.items() if not its or any(key not in stored for key in its)
    )
    if lost:
        raise UsageError(_unfilled(path, places, stored, lost))
    pieces = {
        key: piece
        for name, its in places.items()
        for key, part in its.items()
        if (piece := shards[name] if part is None else part.within(shards[name])) is not None
    }
    turned = {key for name, its in places.items() if may_be_turned(name, module) for key in its}
    pieces = {
        key: _as_stored(piece, stored[key], key) if key in turned else piece
        for key, piece in pieces.items()
    }
    fill_from_safetensors(pieces, {key: stored[key] for key in pieces}, dtype=dtype)


def _as_stored(shard: Shard, file: Path, key: str) -> Shard:
    """A shard as files hold its tensor: turned around, where that has another shape there."""
    if read_header(file)[key] == shard.shape:
        return shard
    (*front, rows, columns), (*before, high, wide) = shard.shape, shard.box
    return Shard(
        shape=(*front, columns, rows),
        box=(*before, wide, high),
        tensor=shard.tensor.transpose(-1, -2),
    )


def _unfilled(path: str, places: Places, stored: Collection[str], lost: list[str]) -> Finding:
    """E507: parameters of which files lack a tensor, which is named as they would have it."""
    missing = [
        key
        for name in lost
        for key in (sorted(key for key in places[name] if key not in stored) or [name])
    ]
    return Finding(
        code="E507",
        what=f"the weights of {path!r} do not fill the model of its config.json",
        got=f"{len(missing)} missing: {known_names(missing)}",
    )


def places_of(
    shapes: Mapping[str, tuple[int, ...]], module: Any, stored: Collection[str]
) -> Places:
    """The tensors of files that each of a module's tensors, of those shapes, is made of.

    One that is the parameter has no part. Of a parameter that files have in parts all are there,
    whether `stored` or not; of one that they do not have there is nothing, as of a value head that
    is called otherwise there.
    """
    tied = tied_names(module)
    inner: Any = getattr(module, "body", module)
    found: Places = {}
    apart: dict[str, dict[str, StoredPart]] | None = None
    for name in shapes:
        own = tied.get(name, [name])
        key = next((key for key in names_in_file(own, inner) if key in stored), None)
        if key is not None:
            found[name] = {key: None}
            continue
        apart = _apart(inner, shapes) if apart is None else apart
        parts = apart.get(name.removeprefix("body."), {})
        found[name] = {_stored_as(key, inner, stored): part for key, part in parts.items()}
    return found


def _apart(inner: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, StoredPart]]:
    """By parameter, the tensors of files that are parts of it, or all of it by another name."""
    found: dict[str, dict[str, StoredPart]] = {}
    own = {name.removeprefix("body."): shape for name, shape in shapes.items()}
    for key, part in (parts_in_files(inner, own) or {}).items():
        found.setdefault(part.own, {})[key] = part
    return found


def _stored_as(key: str, inner: Any, stored: Collection[str]) -> str:
    """A tensor's name in files that may have the prefix of a model's body, or not."""
    return next((name for name in names_in_file([key], inner) if name in stored), key)


def fill_named(
    shards: Mapping[str, Shard], names: Mapping[str, str], path: str, dtype: torch.dtype
) -> None:
    """Fill shards from the tensors at `path` that `names` gives for them."""
    stored = stored_names(path)
    files = {name: stored[key] for name, key in names.items()}
    fill_from_safetensors(shards, files, names, dtype)


@torch.no_grad()
def fill_from_safetensors(
    shards: Mapping[str, Shard],
    files: Mapping[str, Path],
    names: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill shards from safetensors files, reading each one's box and nothing else.

    `files` says by a shard's name which file it is in, `names` what it is called there, where
    that is another name; with `dtype` values are rounded to it first. Raises UsageError for a
    tensor of another shape.
    """
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name in shards:
        by_file.setdefault(files[name], []).append(name)
    for file, inside in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in inside:
                key = name if names is None else names[name]
                fill(shards[name], tensors.get_slice(key), f"{key!r} in {file}", dtype)
                advance(shards[name].tensor.nbytes, "bytes read")


def fill(shard: Shard, stored: Any, place: str, dtype: torch.dtype | None) -> None:
    """Copy one shard's box out of a tensor on disk."""
    shape = tuple(stored.get_shape())
    if shape != shard.shape:
        raise UsageError(
            Finding(
                code="E507",
                what=f"the weight {place} has another shape than the model's",
                got=str(shape),
                expected=str(shard.shape),
            )
        )
    if not shard.tensor.numel():
        return
    # Checkpoints hold what the shard is; a file may hold a number of another width.
    each = shard.tensor.itemsize if dtype is None else bytes_while_read(stored.get_dtype(), dtype)
    for part, held in box_pieces(shard, each):
        piece = stored[tuple(slice(*bounds) for bounds in part)] if shape else stored[...]
        held.copy_(piece if dtype is None else piece.to(dtype))


def bytes_while_read(stored: str, dtype: torch.dtype) -> int:
    """Bytes on the host of a number `stored` so in its file: as it is there, and as rounded."""
    read = FILE_BYTES.get(stored, 8)
    return read if stored == FILE_DTYPES.get(dtype) else read + dtype.itemsize


def box_pieces(shard: Shard, each: int) -> Iterator[tuple[tuple[tuple[int, int], ...], Tensor]]:
    """Runs of rows of at most `LOADING_PIECE`, or of one row: the box of each, and its memory.

    A number takes `each` bytes meanwhile.
    """
    if not shard.box:
        yield shard.box, shard.tensor
        return
    (first, last), *rest = shard.box
    row = shard.tensor.numel() // (last - first) * each
    step = max(LOADING_PIECE // max(row, 1), 1)
    for start in range(first, last, step):
        stop = min(start + step, last)
        yield ((start, stop), *rest), shard.tensor[start - first : stop - first]


@torch.no_grad()
def fill_random(shards: Mapping[str, Shard], make: Callable[[], nn.Module]) -> None:
    """Fill shards with the weights that `make` draws, as one process that makes it would."""
    for name, tensor in drawn_parameters(make):
        if name in shards:
            shard = shards[name]
            shard.tensor.copy_(tensor[tuple(slice(*bounds) for bounds in shard.box)])


@torch.no_grad()
def fill_adapters(shards: Mapping[str, Shard], seed: int, dtype: torch.dtype) -> None:
    """Fill the shards of adapters with what they start from, rounded to `dtype`."""
    for name, shard in shards.items():
        if name.endswith(DOWN):
            down = initial_down(seed, name, *shard.shape).to(dtype)
            shard.tensor.copy_(down[tuple(slice(*bounds) for bounds in shard.box)])


def whole_buffers(module: nn.Module) -> dict[str, Shard]:
    """The buffers that a module's files hold, each whole: every rank of a model has all of them."""
    held = module.state_dict()
    return whole_shards({name: held[name] for name in sorted(stored_buffers(module))})


def fill_all(
    shards: Mapping[str, Shard],
    model: Filled,
    path: str,
    *,
    seed: int,
    make: Callable[[], nn.Module] | None = None,
) -> None:
    """Fill all shards of a model: from `path`, or with what `make` draws where it is given.

    A fresh head and the outer half of adapters stay zero, and buffers of a drawn model what they
    are at first.
    """
    fill_adapters(shards, seed, model.dtype)
    plain = {name: shard for name, shard in shards.items() if not is_adapter(name)}
    if make is not None:
        fill_random(plain, make)
        return
    heads = {name for name in plain if name.startswith(f"{ADDED_HEAD}.")}
    body = {name: shard for name, shard in plain.items() if name not in heads}
    fill_pretrained(body, model.module, path, model.dtype)
    fill_pretrained(whole_buffers(model.module), model.module, path, None)
    stored = getattr(model.module, "stored_head", None)
    if stored is not None:
        names = {f"{ADDED_HEAD}.{inside}": key for inside, key in stored.stored().items()}
        fill_named({name: plain[name] for name in heads}, names, path, model.dtype)
