"""Fields of a batch as columns of Arrow, and back: the same bits, whatever the dtype.

A ragged dimension is a list, and so is every one after it. What Arrow has no type for is kept as
its bits: bfloat16 as uint16, one byte of a float as uint8, others as bytes of a fixed width. Text
is a string where its bytes are UTF-8. Each column's dtype is kept beside it, by name.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlflow.batch import flat, is_ragged, offsets
from rlflow.runtime.record.edges.arrow import arrow_numbers
from rlflow.runtime.record.edges.names import TEXT

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = {
    torch.bool: np.bool_,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16}
# Offsets of Arrow's lists are of 32 bits.
LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A field as Arrow holds it.

    `values` is a `pyarrow.Array` with an entry a row; `shape` has the sizes of the dimensions
    after the rows, None for a ragged one.
    """

    values: Any
    dtype: str
    shape: tuple[int | None, ...]


def as_column(field: Tensor, *, text: bool = False) -> Column:
    """A field `[rows, ...]` or `[rows, j, ...]` as a column; `text` reads its bytes as UTF-8."""
    field = field.detach()
    if text:
        return _text(field)
    values = flat(field) if is_ragged(field) else field
    values = values.to("cpu", memory_format=torch.contiguous_format)
    found, shape = _numbers(values), list(values.shape[1:])
    for place in reversed(range(len(shape))):
        count = math.prod(values.shape[: place + 1])
        found = _listed(found, np.arange(count + 1, dtype=np.int64) * shape[place])
    if not is_ragged(field):
        return Column(values=found, dtype=_name(values.dtype), shape=tuple(shape))
    made = _listed(found, offsets(field).cpu().numpy())
    return Column(values=made, dtype=_name(values.dtype), shape=(None, *shape))


def field_of(column: Column) -> Tensor:
    """The field that a column was made of, on the CPU, bit for bit.

    `values` may be a chunked array, as tables have them.
    """
    import pyarrow as pa

    array = column.values
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    rows = len(array)
    if column.dtype == TEXT:
        return _text_field(array)
    bounds = None
    for place, size in enumerate(column.shape):
        if size is None:
            starts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
            assert place == 0, "only the first dimension after the rows is ragged"
            bounds = starts - starts[0]
        array = array.flatten()
    sizes = [size for size in column.shape if size is not None]
    count = rows if bounds is None else int(bounds[-1])
    values = _tensor(array, column.dtype).reshape(count, *sizes)
    if bounds is None:
        return values
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(bounds.copy()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numbers(values: Tensor) -> Any:
    """Values of any shape as one flat Arrow array."""
    import pyarrow as pa

    flat_values = values.reshape(-1)
    if values.dtype in PLAIN:
        return arrow_numbers(flat_values.numpy())
    width = values.dtype.itemsize
    raw = flat_values.view(torch.uint8).numpy() if len(flat_values) else np.empty(0, np.uint8)
    if width in BITS:
        return arrow_numbers(raw.view(BITS[width]))
    kind = pa.binary(width)
    return pa.Array.from_buffers(kind, len(flat_values), [None, pa.py_buffer(raw)])


def _tensor(array: Any, name: str) -> Tensor:
    """The flat values of an Arrow array as a tensor of a dtype."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype in PLAIN:
        return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    if dtype.itemsize in BITS:
        raw = array.to_numpy(zero_copy_only=False).view(np.uint8).copy()
    else:
        raw = np.frombuffer(b"".join(array.to_pylist()), np.uint8).copy()
    return torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)


def _listed(values: Any, bounds: Any) -> Any:
    """Values as lists between bounds."""
    import pyarrow as pa

    if bounds[-1] > LONGEST:
        return pa.LargeListArray.from_arrays(arrow_numbers(bounds), values)
    return pa.ListArray.from_arrays(arrow_numbers(bounds.astype(np.int32)), values)


def _text(field: Tensor) -> Column:
    """Ragged bytes as strings; as binary where they are no UTF-8."""
    import pyarrow as pa

    raw = flat(field).to("cpu").contiguous().numpy()
    bounds = offsets(field).cpu().numpy()
    large = bounds[-1] > LONGEST
    kind = pa.large_binary() if large else pa.binary()
    buffers = [None, pa.py_buffer(bounds if large else bounds.astype(np.int32)), pa.py_buffer(raw)]
    made = pa.Array.from_buffers(kind, len(bounds) - 1, buffers)
    with contextlib.suppress(pa.ArrowInvalid):
        made = made.cast(pa.large_string() if large else pa.string())
    return Column(values=made, dtype=TEXT, shape=())


def _text_field(array: Any) -> Tensor:
    """Strings as the ragged bytes that they were."""
    import pyarrow as pa

    found = array.cast(pa.large_binary())
    rows = [np.frombuffer(row, np.uint8) for row in found.to_pylist()]
    bounds = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    raw = np.concatenate([*rows, np.empty(0, np.uint8)])
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(raw), torch.from_numpy(bounds))
