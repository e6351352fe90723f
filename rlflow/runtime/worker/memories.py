"""Rows that nodes keep for later iterations, as tensors that a checkpoint can hold.

A field is one tensor, or two where its rows have lengths of their own. This file knows neither
what is kept nor when a checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlflow.batch import Batch, flat, is_ragged, lengths, make_batch, ragged
from rlflow.errors import CheckpointError, Finding
from rlflow.runtime.record.shards.reading import open_component

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.graph.graph import Graph
    from rlflow.runtime.record.shards.places import StoredFile
    from rlflow.scheduler.plan.plan import Plan

VALUES, LENGTHS = " values", " lengths"  # no name of a field has a blank
ROWS = "rows"


def component(node: str) -> str:
    """The name of the checkpoint's component that holds what a node keeps."""
    return f"{node}.{ROWS}"


def keepers(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The devices that have what a node keeps, each all of it; the first writes it."""
    return {n.name: plan.action(n.name).devices for n in plan.graph.nodes if n.op.recalls}


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


def restored(graph: Graph, files: Mapping[str, Sequence[StoredFile]]) -> dict[str, Batch]:
    """What nodes had kept, of a checkpoint's files; raises CheckpointError where it is missing."""
    found = {}
    for node in (node.name for node in graph.nodes if node.op.recalls):
        if component(node) not in files:
            finding = Finding(code="E792", what=f"the checkpoint lacks the rows {node!r} had kept")
            raise CheckpointError(finding)
        with open_component(files[component(node)]) as stored:
            found[node] = rows_of_tensors({name: tensor[...] for name, tensor in stored.items()})
    return found
