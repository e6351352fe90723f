"""Rows that nodes keep for later iterations, as tensors that a checkpoint can hold.

A field is one tensor, or two where its rows have lengths of their own. This file knows neither
what is kept nor when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.batch import Batch, flat, is_ragged, lengths, make_batch, ragged
from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.checkpoint import COMPONENT_POINTS
from rlflow.runtime.record.durable import disk_errors, write_file
from rlflow.runtime.record.tensorfile import file_parts, header_of, load_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.graph.graph import Graph
    from rlflow.runtime.record.durable import FileRecord

VALUES, LENGTHS = " values", " lengths"  # no name of a field has a blank
ROWS = "rows"


def component(node: str) -> str:
    """The name of the checkpoint's component that holds what a node keeps."""
    return f"{node}.{ROWS}"


def tensors_of(kept: Batch) -> dict[str, Tensor]:
    """The fields of rows, each as one tensor, or as its flat values and its lengths."""
    found: dict[str, Tensor] = {}
    for name, field in kept.items():
        if is_ragged(field):
            found[name + VALUES], found[name + LENGTHS] = flat(field), lengths(field)
        else:
            found[name] = field
    return found


def rows_of_tensors(tensors: Mapping[str, Tensor]) -> Batch:
    """The rows of which those are the tensors."""
    fields = {}
    for name, tensor in tensors.items():
        if name.endswith(VALUES):
            own = name.removesuffix(VALUES)
            fields[own] = ragged(tensor, tensors[own + LENGTHS])
        elif not name.endswith(LENGTHS):
            fields[name] = tensor
    return make_batch(fields, min(map(len, fields.values()), default=0))


def size_of(node: str, kept: Batch) -> int:
    """Bytes of the component's file."""
    return header_of(component(node), tensors_of(kept))[1]


def save_rows(node: str, kept: Batch, path: Path) -> FileRecord:
    """Write what a node keeps."""
    tensors = tensors_of(kept)
    header, _ = header_of(component(node), tensors)
    with disk_errors(CheckpointError, f"save {path.name}", path.parent):
        return write_file(path, file_parts(header, tensors), COMPONENT_POINTS)


def restored(graph: Graph, files: Mapping[str, str] | Mapping[str, Path]) -> dict[str, Batch]:
    """What nodes had kept, of a checkpoint's files; raises CheckpointError where it is missing."""
    found = {}
    for node in (node.name for node in graph.nodes if node.op.recalls):
        path = files.get(component(node))
        if path is None:
            finding = Finding(code="E792", what=f"the checkpoint lacks the rows {node!r} had kept")
            raise CheckpointError(finding)
        found[node] = rows_of_tensors(load_tensors(Path(path)))
    return found
