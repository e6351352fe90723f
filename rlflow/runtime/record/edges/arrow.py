"""Numbers of numpy as an array of Arrow, over the same memory.

`pyarrow.array` imports pandas wherever that is installed: most of a second of a core, and 40 MB, in
every process of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def arrow_numbers(values: NDArray[Any]) -> Any:
    """A flat array of numbers or bools as a `pyarrow.Array` without nulls."""
    import pyarrow as pa

    bits = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    buffer = pa.py_buffer(np.ascontiguousarray(bits))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])
