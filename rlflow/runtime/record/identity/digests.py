"""What decides a run's numbers beside its graph: rows of data, source of functions, model files.

Part of a run's identity under `NODE.data`, `NODE.source` and `MODEL.files`, so that another
number after a resume always has a name. Knows the graph; computes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlflow.data import DataSource
from rlflow.errors import RlflowError
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drawn
from rlflow.modelfiles.directories import model_directory
from rlflow.runtime.record.identity.files import model_digests
from rlflow.runtime.record.identity.sources import source_digests

KINDS = ("data", "source", "files")
BETWEEN = ", "
UNKNOWN = (
    "its checkpoint has no digests of data, functions and model files: "
    "whether they are as they were is not known"
)


def digests_of(graph: Graph, near: Path | None) -> dict[str, str]:
    """The digests of a graph by path, a line each; `near` is its pipeline's file.

    What cannot be read is left out: who reads it says so.
    """
    found = {}
    for node in graph.nodes:
        found[f"{node.name}.data"] = _data_of(node)
        held = [value for _, value in node.params]
        found[f"{node.name}.source"] = _line(source_digests([node.op.function, *held]))
    for model in graph.models:
        with suppress(RlflowError, OSError):
            directory = model_directory(model.path, near)
            if directory is not None:
                drawn = model.init == "random"
                found[f"{model.name}.files"] = _line(model_digests(directory, weights=not drawn))
    return {path: line for path, line in found.items() if line}


def is_digest(path: str) -> bool:
    """Whether a path of an identity is that of a digest."""
    return path.rpartition(".")[2] in KINDS and "." in path


def comparable(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """Two identities without digests that only one of them has.

    A node that is new is a change of the graph; an old checkpoint has no digests at all.
    """
    both = saved.keys() & now.keys()
    return tuple(
        {key: value for key, value in each.items() if key in both or not is_digest(key)}
        for each in (saved, now)
    )


def unknown_digests(saved: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether a checkpoint is of a time before digests, so that nobody knows what has changed."""
    return any(map(is_digest, now)) and not any(map(is_digest, saved))


def differing_parts(before: str, now: str) -> tuple[str, str]:
    """Two lines of digests without the parts that both have."""
    one, other = before.split(BETWEEN), now.split(BETWEEN)
    return (
        BETWEEN.join(part for part in one if part not in other) or "nothing more",
        BETWEEN.join(part for part in other if part not in one) or "nothing more",
    )


def _data_of(node: Node) -> str:
    drawn = node.role(Drawn)
    source = drawn.data if drawn is not None else None
    with suppress(RlflowError, OSError):
        return source.content() if isinstance(source, DataSource) else ""
    return ""


def _line(digests: Mapping[str, str]) -> str:
    return BETWEEN.join(f"{name} {digest}" for name, digest in sorted(digests.items()))
