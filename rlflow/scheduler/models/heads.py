"""Value heads of models whose files are on this machine: where each comes from, or why it cannot.

A head that no file holds is fresh where the model is trained, and the plan says so. Reads the
headers of safetensors files and no weights; engines read the same at load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlflow.errors import Finding
from rlflow.graph.graph import Graph
from rlflow.graph.model import Model
from rlflow.modelfiles.configs import read_config
from rlflow.modelfiles.directories import model_directory
from rlflow.modelfiles.headers import tensor_shapes
from rlflow.modelfiles.heads import Head, find_head, note_of
from rlflow.scheduler.models.known_shapes import PREFIX


def head_findings(graph: Graph, near: Path | None) -> list[Finding]:
    """E524 and E525 for every model with a value head that its files do not hold, or not so."""
    return [
        replace(finding, where=model.where)
        for model in graph.models
        for _, findings in _looked_up(model, near)
        for finding in findings
    ]


def head_notes(graph: Graph, near: Path | None) -> list[str]:
    """Where the head of every model with one comes from, a line each."""
    return [
        f"that of {model.name} is {_drawn(model) if model.init == 'random' else note_of(head)}"
        for model in graph.models
        for head, findings in _looked_up(model, near)
        if not findings
    ]


def _drawn(model: Model) -> str:
    return "random, as its other weights" if model.optimizer is None else "fresh"


def _looked_up(model: Model, near: Path | None) -> list[tuple[Head | None, list[Finding]]]:
    """What the files of a model say of its head; nothing where they are not here."""
    if model.head != "value":
        return []
    if model.init == "random":
        return [(None, [])]
    folder = None if model.path.startswith(PREFIX) else model_directory(model.path, near)
    shapes = {} if folder is None else tensor_shapes(folder)
    if folder is None or not shapes:
        return []
    fresh = model.optimizer is not None
    return [find_head(shapes, read_config(folder), model.path, fresh=fresh)]
