"""Names and shapes of the tensors in safetensors files, from their headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from rlflow.errors import Finding, UsageError

Shape = tuple[int, ...]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a model's weights: those of its index, the one, or all there are."""
    names = indexed_names(directory)
    if names:
        return [directory / name for name in names if (directory / name).is_file()]
    single = directory / SINGLE
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def indexed_names(directory: Path) -> list[str]:
    """The files that an index of weights names; none where there is no index.

    Raises UsageError (E205) for an index that is damaged, or that names a file elsewhere.
    """
    index = directory / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elsewhere = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"[:300]
        what = f"{index} is no index of weights"
        raise UsageError(Finding(code="E205", what=what, got=got)) from None
    if elsewhere:
        raise UsageError(
            Finding(
                code="E205",
                what=f"{index} names a file outside of its directory",
                got=f"{elsewhere[0]!r:.200}",
                expected="names of files that lie beside it",
            )
        )
    return names


def tensor_shapes(directory: Path) -> dict[str, Shape]:
    """The shape of every tensor of a model by name; empty where it has no safetensors files.

    Raises UsageError for a file that is none.
    """
    return {name: shape for name, (shape, _) in _tensors(directory).items()}


def tensor_dtypes(directory: Path) -> dict[str, str]:
    """The dtype of every tensor of a model by name, as safetensors calls it: "BF16", "F32"."""
    return {name: dtype for name, (_, dtype) in _tensors(directory).items()}


def _tensors(directory: Path) -> dict[str, tuple[Shape, str]]:
    found: dict[str, tuple[Shape, str]] = {}
    for file in weight_files(directory):
        found |= _read_header(file)
    return found


def read_header(file: Path) -> dict[str, Shape]:
    """The shapes that one file's header says. Raises UsageError where it is damaged."""
    return {name: shape for name, (shape, _) in _read_header(file).items()}


def _read_header(file: Path) -> dict[str, tuple[Shape, str]]:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > file.stat().st_size:
                raise ValueError(f"a header of {size} bytes, in a file of {file.stat().st_size}")
            header = json.loads(stream.read(size))
        return {
            name: (tuple(map(int, entry["shape"])), str(entry["dtype"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (
        *(struct.error, ValueError, KeyError, TypeError, AttributeError),
        *(OverflowError, MemoryError),
    ) as error:
        what = f"{file} is no safetensors file"
        got = f"{type(error).__name__}: {error}"[:300]
        raise UsageError(Finding(code="E205", what=what, got=got)) from None
