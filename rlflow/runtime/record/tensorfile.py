"""Tensors as a safetensors file, one at a time and without a second copy of all of them.

Holds the header and the bytes in order; the library's own writer wants every tensor on the host at
once and a second pass for a digest.
This file does not know what a checkpoint is. torch and numpy are imported inside functions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rlflow.errors import CheckpointError, Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    AnyTensor: TypeAlias = Tensor | NDArray[Any]

COMPONENT_FORM = re.compile(r"\w[\w.-]*", re.ASCII)

# The names of the safetensors format, and bytes per element.
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


def _dtype(component: str, name: str, tensor: AnyTensor) -> tuple[str, int]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(
            Finding(
                code="E724",
                what=f"{component}: tensor {name!r} has a dtype that safetensors cannot hold",
                got=dtype,
                expected=", ".join(DTYPES),
            )
        )
    return DTYPES[dtype]


def ordered(tensors: Mapping[str, AnyTensor]) -> list[tuple[str, AnyTensor]]:
    """Wide elements first, so that every tensor is aligned in the file; then by name."""
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def header_of(component: str, tensors: Mapping[str, AnyTensor]) -> tuple[bytes, int]:
    """The header of a safetensors file, and the size of the whole file in bytes.

    Layout (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
    length, header as JSON padded with blanks to a multiple of 8, then the tensors' bytes.
    Raises `CheckpointError` for a dtype or a component name that a file cannot hold.
    """
    if not COMPONENT_FORM.fullmatch(component):
        raise CheckpointError(
            Finding(
                code="E725",
                what=f"the component {component!r} cannot name a file",
                expected="letters, digits, '_', '-' and '.', not starting with '-' or '.'",
            )
        )
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered(tensors):
        code, width = _dtype(component, name, tensor)
        shape = [int(length) for length in tensor.shape]
        end = offset + math.prod(shape) * width
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, len(header) + offset


def file_parts(header: bytes, tensors: Mapping[str, AnyTensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: the header, then one tensor at a time."""
    yield header
    for _, tensor in ordered(tensors):
        yield raw_bytes(tensor)


def raw_bytes(tensor: AnyTensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes."""
    import numpy as np

    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch

    # A copy, for storage that numpy has seen can never be resized, and so never put to sleep.
    host = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().data
