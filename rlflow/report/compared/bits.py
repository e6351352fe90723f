"""A recorded column as the bits of its rows, and a value of it as a person reads it.

Equal bits are equal values; NaN is equal to itself, and 0.0 differs from -0.0.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise, zip_longest
from typing import Any

from rlflow.runtime.record.edges.names import TEXT

SHOWN = 60
BEFORE = 20
END = "the end of the row"
# How `struct` names them.
FLOATS = {"float16": "<e", "float32": "<f", "float64": "<d"}


def row_bits(column: Any) -> list[object]:
    """What each row of a column of Arrow holds: equal exactly where all of its bits are."""
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(array, "chunks"):
        array = array.chunk(0)
    bounds = None
    while _is_list(array.type):
        starts = array.offsets.to_numpy()
        bounds = starts if bounds is None else starts[bounds]
        array = array.values
    leaves = _leaves(array)
    if bounds is None:
        return list(leaves)
    return [leaves[a:b] for a, b in pairwise(bounds)]


def first_place(one: object, other: object) -> int | None:
    """The place of the first token or character at which two rows differ; None of one number."""
    if not isinstance(one, list | str) or not isinstance(other, list | str):
        return None
    pairs = enumerate(zip_longest(one, other))
    return next((place for place, (a, b) in pairs if a != b), None)


def shown_value(held: object, place: int | None, dtype: str) -> str:
    """A value of `row_bits` as text, at a place of the row; floats with their bits."""
    if place is None or not isinstance(held, list | str):
        return _number(held, dtype)
    if place >= len(held):
        return END
    if dtype == TEXT and isinstance(held, str):
        start = max(0, place - BEFORE)
        piece = held[start : start + SHOWN]
        before, after = "..." * (start > 0), "..." * (start + SHOWN < len(held))
        return f"{before}{piece!r}{after}"
    return _number(held[place], dtype)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _leaves(array: Any) -> list[Any]:
    """Flat values; floats as the whole numbers that their bits are."""
    import pyarrow as pa

    if not pa.types.is_floating(array.type):
        return list(array.to_pylist())
    values = array.to_numpy(zero_copy_only=False)
    return list(values.view(f"u{values.dtype.itemsize}").tolist())


def _number(held: Any, dtype: str) -> str:
    """One value: a float as its shortest decimal and its bits, anything else as it is."""
    if dtype == "bfloat16":
        return f"{_decimal('<f', held << 16)} (0x{held:04x})"
    if dtype in FLOATS:
        form = FLOATS[dtype]
        return f"{_decimal(form, held)} (0x{held:0{2 * struct.calcsize(form)}x})"
    text = repr(held)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _decimal(form: str, bits: int) -> str:
    """The shortest decimal that has the bits of a float of `form`; nan or inf where it is one."""
    raw = bits.to_bytes(struct.calcsize(form), "little")
    value = struct.unpack(form, raw)[0]
    rounded = (float(f"{value:.{digits}g}") for digits in range(1, 18))
    return repr(next((each for each in rounded if _packed(form, each) == raw), value))


def _packed(form: str, value: float) -> bytes:
    """The bytes of a float; none of one that is rounded beyond the largest."""
    with suppress(OverflowError):
        return struct.pack(form, value)
    return b""
