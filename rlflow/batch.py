"""The tensors of an edge: one `TensorDict` of rows, ragged along the tokens.

A batch has `batch_size == [rows]`. A row field is a tensor `[rows, ...]`; a token
field is a jagged nested tensor `[rows, j]`, so nothing is padded; text is the UTF-8
bytes of each row, ragged uint8. Everything is a tensor: a batch can be written to
safetensors or mapped from shared memory as it is, and is never pickled. Rows of a `shared` field
may lie in the same values, such as the picture of a prompt of which there are several samples.

This file knows neither which op made a batch nor where it lives.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

Batch: TypeAlias = TensorDict

# tensordict asks torch.fx a question that torch 2.13 answers with a warning to the screen.
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def make_batch(fields: Mapping[str, Tensor], rows: int) -> Batch:
    """Join named fields, each with `rows` rows, into one batch."""
    return TensorDict(dict(fields), batch_size=[rows])


def split_rows(field: Tensor) -> list[Tensor]:
    """The rows of a jagged field, one 1-d tensor each."""
    parts = torch.split(flat(field), lengths(field).tolist())
    return list(parts)


def is_ragged(field: Tensor) -> bool:
    """Whether a field has a length of its own in every row."""
    return bool(field.is_nested)


def ragged(values: Tensor, lengths: Tensor) -> Tensor:
    """Make a jagged `[rows, j]` field of flat `values [total, ...]` and `lengths [rows]`."""
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(lengths, 0, out=bounds[1:])
    return torch.nested.nested_tensor_from_jagged(values, bounds)


def ragged_like(values: Tensor, like: Tensor) -> Tensor:
    """Make a jagged field of flat `values` with the row lengths of `like`."""
    return torch.nested.nested_tensor_from_jagged(values, offsets(like))


def ragged_rows(rows: Sequence[Sequence[int] | Tensor], dtype: torch.dtype) -> Tensor:
    """Make a jagged field of one sequence per row (lists or 1-d tensors)."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if any(isinstance(row, Tensor) for row in rows):
        return ragged(torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows]), lengths)
    return ragged(torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype), lengths)


def shared(values: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Make a jagged field of rows that begin at `starts` in `values`, any of them in the same."""
    bounds = torch.cat([starts, starts.new_full((1,), len(values))])
    return torch.nested.nested_tensor_from_jagged(values, bounds, sizes)


def shared_parts(field: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values of a jagged field as they lie, where each row begins in them, and row lengths."""
    values: Tensor = field.values()
    bounds: Tensor = field.offsets()  # type: ignore[attr-defined]
    said: Tensor | None = field.lengths()  # type: ignore[attr-defined]
    return values, bounds[:-1], bounds.diff() if said is None else said


def is_shared(field: Tensor) -> bool:
    """Whether rows of a jagged field may lie in the same values."""
    return is_ragged(field) and field.lengths() is not None  # type: ignore[attr-defined]


def shared_rows(field: Tensor, index: Tensor) -> Tensor:
    """The rows `index` of a jagged field, repeats among them, whose values lie there once."""
    values, starts, sizes = shared_parts(field)
    return shared(values, starts[index], sizes[index])


def flat(field: Tensor) -> Tensor:
    """The values of a jagged field row by row, `[total, ...]`; of a shared one copies."""
    values: Tensor = field.values()
    if not is_shared(field):
        return values
    _, starts, sizes = shared_parts(field)
    return values[torch.repeat_interleave(starts, sizes) + column_index(sizes)]


def offsets(field: Tensor) -> Tensor:
    """Where each row begins in `flat`, and where the last one ends, int64 `[rows + 1]`."""
    if is_shared(field):
        sizes = lengths(field)
        return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    result: Tensor = field.offsets()  # type: ignore[attr-defined]
    return result


def lengths(field: Tensor) -> Tensor:
    """The row lengths of a jagged field, int64 `[rows]`."""
    return shared_parts(field)[2]


def row_index(field_lengths: Tensor) -> Tensor:
    """For every flat value the row it belongs to, int64 `[total]`."""
    rows = torch.arange(len(field_lengths), device=field_lengths.device)
    return torch.repeat_interleave(rows, field_lengths)


def column_index(field_lengths: Tensor) -> Tensor:
    """For every flat value its position within its row, int64 `[total]`."""
    starts = field_lengths.cumsum(0) - field_lengths
    total = int(field_lengths.sum())
    positions = torch.arange(total, device=field_lengths.device)
    return positions - torch.repeat_interleave(starts, field_lengths)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on a device, without waiting for it: to CUDA by way of pinned memory.

    Torch keeps the pinned copy until the device has read it.
    """
    if x.device.type != "cpu" or device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def pad(values: Tensor, field_lengths: Tensor, fill: float = 0) -> Tensor:
    """Spread flat values `[total, ...]` into `[rows, longest, ...]`; differentiable in `values`."""
    width = int(field_lengths.max()) if len(field_lengths) else 0
    padded = values.new_full((len(field_lengths), width, *values.shape[1:]), fill)
    places = row_index(field_lengths), column_index(field_lengths)
    return padded.index_put(tuple(to_device(each, values.device) for each in places), values)


def unpad(padded: Tensor, field_lengths: Tensor) -> Tensor:
    """The inverse of `pad`: `[rows, longest, ...]` back to flat `[total, ...]`."""
    return padded[row_index(field_lengths), column_index(field_lengths)]


def text(strings: Iterable[str]) -> Tensor:
    """Text as a jagged uint8 field of its UTF-8 bytes."""
    encoded = [string.encode() for string in strings]
    blob = bytearray(b"".join(encoded))
    empty = torch.empty(0, dtype=torch.uint8)
    joined = torch.frombuffer(blob, dtype=torch.uint8) if blob else empty
    return ragged(joined, torch.tensor([len(part) for part in encoded], dtype=torch.int64))


def strings(field: Tensor) -> list[str]:
    """The rows of a text field as Python strings."""
    blob = flat(field).numpy().tobytes()
    bounds = offsets(field).tolist()
    return [blob[a:b].decode() for a, b in itertools.pairwise(bounds)]


def select_rows(batch: Batch, index: Tensor | Sequence[int]) -> Batch:
    """The rows `index` (int64 `[n]`, any order, repeats allowed) of every field."""
    chosen = torch.as_tensor(index, dtype=torch.int64)
    return make_batch(
        {name: select_field(field, chosen) for name, field in batch.items()}, len(chosen)
    )


def select_field(field: Tensor, index: Tensor) -> Tensor:
    """The rows `index` of one field."""
    if not is_ragged(field):
        return field[index]
    if is_shared(field):
        return _select_shared(field, index)
    bounds = offsets(field)
    if bounds.device.type == "cpu" and index.device.type == "cpu":
        places, ends = _places(bounds.numpy(), index.numpy())
        return torch.nested.nested_tensor_from_jagged(flat(field)[places], ends)
    size = lengths(field)[index]
    starts = bounds[:-1][index]
    return ragged(flat(field)[torch.repeat_interleave(starts, size) + column_index(size)], size)


def _select_shared(field: Tensor, index: Tensor) -> Tensor:
    """The rows of a shared field, with the values that some of them lie in and no others."""
    values, starts, sizes = shared_parts(field)
    begun, which = starts[index].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    size = begun.new_zeros(len(begun)).scatter_reduce(0, which, sizes[index], "amax")
    kept = torch.repeat_interleave(begun, size) + column_index(size)
    return shared(values[kept], (size.cumsum(0) - size)[which], sizes[index])


def _places(bounds: NDArray[np.int64], index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Where the values of some rows lie among all, and the bounds of those rows.

    By numpy, which takes two thirds of torch's time where rows are few.
    """
    starts = bounds[:-1][index]
    sizes = bounds[1:][index] - starts
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    places = np.arange(ends[-1])
    places += np.repeat(starts - ends[:-1], sizes)
    return torch.from_numpy(places), torch.from_numpy(ends)


def prompt_groups(prompt_tokens: Tensor, pixels: Tensor | None = None) -> NDArray[np.int64]:
    """For each row the first row with the same prompt, int64 `[rows]`; its `pixels` are too."""
    values = flat(prompt_tokens).cpu().numpy()
    bounds = offsets(prompt_tokens).cpu().numpy()
    shown = [b""] * (len(bounds) - 1) if pixels is None else _digests(pixels)
    seen: dict[bytes, int] = {}
    first = np.empty(len(bounds) - 1, dtype=np.int64)
    for row in range(len(first)):
        prompt = values[bounds[row] : bounds[row + 1]].tobytes()
        first[row] = seen.setdefault(prompt + shown[row], row)
    return first


def _digests(field: Tensor) -> list[bytes]:
    """A digest of each row's values, made once for rows that lie in the same."""
    values, starts, sizes = (part.detach().cpu() for part in shared_parts(field))
    made: dict[tuple[int, int], bytes] = {}
    lying = list(zip(starts.tolist(), sizes.tolist(), strict=True))
    for start, size in lying:
        if (start, size) not in made:
            raw = values[start : start + size].contiguous().numpy().tobytes()
            made[start, size] = hashlib.blake2b(raw, digest_size=16).digest()
    return [made[place] for place in lying]


def joined_rows(first: Tensor, second: Tensor) -> Tensor:
    """Two ragged fields of equally many rows as one: each row of the first, then the second's."""
    sizes = torch.stack([lengths(first), lengths(second)], 1)
    pairs = ragged(torch.cat([flat(first), flat(second)]), sizes.t().flatten())
    rows = torch.arange(2 * len(sizes)).view(2, -1).t().flatten()
    return ragged(flat(select_field(pairs, rows)), sizes.sum(1))


def concat_rows(batches: Sequence[Batch]) -> Batch:
    """Join batches of the same fields, rows in the order given."""
    rows = sum(int(batch.batch_size[0]) for batch in batches)
    fields = {}
    for name in batches[0].keys():  # noqa: SIM118  a TensorDict iterates over rows, not keys
        parts = [batch.get(name) for batch in batches]
        if any(map(is_shared, parts)):
            fields[name] = _concat_shared(parts)
        elif is_ragged(parts[0]):
            joined = torch.cat([lengths(part) for part in parts])
            fields[name] = ragged(torch.cat([flat(part) for part in parts]), joined)
        else:
            fields[name] = torch.cat(parts)
    return make_batch(fields, rows)


def _concat_shared(parts: Sequence[Tensor]) -> Tensor:
    """Jagged fields one after the other, of which some share values."""
    lying = [shared_parts(part) for part in parts]
    before = itertools.accumulate([0, *(len(values) for values, _, _ in lying)])
    return shared(
        torch.cat([values for values, _, _ in lying]),
        torch.cat([start + first for first, (_, start, _) in zip(before, lying, strict=False)]),
        torch.cat([sizes for _, _, sizes in lying]),
    )
