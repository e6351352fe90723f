"""Whether a record has what a plan is going to read: every row, and the fields with their types.

Reads no row: what a file says of itself is in its footer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, RunDirError, UsageError, known_names, near_names
from rlflow.graph.fields import Field
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Recorded
from rlflow.runtime.record.edges.names import (
    DTYPES,
    SHAPES,
    TEXT,
    About,
    edge_directory,
    recorded_span,
)
from rlflow.runtime.record.edges.reading import recorded
from rlflow.runtime.record.rundir import RunDir

GROUP = "group"
NAMED = 6


def require_recorded(graph: Graph, iterations: range) -> None:
    """Raise UsageError where sources of a graph would find no rows, some, or others than declared.

    E335 for iterations that are not there or not whole, E336 for fields; with every finding.
    """
    findings = []
    for node, role in graph.having(Recorded):
        run = RunDir.view(Path(role.record)).path
        wanted = {b.field.name for n in graph.nodes for b in n.inputs if b.source == node.name}
        due = [iteration for iteration in iterations if node.due(iteration)]
        missing = unrecorded(run, role.edge, due)
        if missing:
            whole = next((at for at, number in enumerate(due) if number in missing), 0)
            fewer = due[whole] if whole and due[whole:] == [*missing] else None
            findings.append(partly(run, role.edge, missing, fewer=fewer))
        elif due:
            findings += field_findings(run, node, role.edge, due[0], wanted)
    if findings:
        raise UsageError(*findings, summary="Nothing was started.")


def require_some_whole(graph: Graph) -> None:
    """Raise UsageError E335 where a record that a graph reads has all rows of no iteration.

    The first and the last one are looked at, for a run records all of them by one rule.
    """
    findings = []
    for _, role in graph.having(Recorded):
        run = RunDir.view(Path(role.record)).path
        there = sorted(_files(run, role.edge))
        ends = [*dict.fromkeys([*there[:1], *there[-1:]])] or [0]
        missing = unrecorded(run, role.edge, ends)
        if len(missing) == len(ends):
            findings.append(partly(run, role.edge, {ends[0]: missing[ends[0]]}))
    if findings:
        raise UsageError(*findings, summary="Nothing was started.")


def unrecorded(run: Path, edge: str, iterations: Iterable[int]) -> dict[int, int]:
    """The iterations of which not all rows of an edge are recorded, and how many are of each."""
    found = {}
    files = _files(run, edge)
    for iteration in iterations:
        rows, total = 0, -1
        for path in files.get(iteration, ()):
            count, about, _ = _footer(path)
            rows = rows + len(about.places(count)[iteration])
            total = about.of(iteration).total
        if rows != total:
            found[iteration] = rows
    return found


def whole_edges(run: Path, iteration: int) -> frozenset[str]:
    """The nodes of whose rows in an iteration a run has recorded every one."""
    edges = [edge for edge, there in recorded(run).items() if iteration in there]
    return frozenset(edge for edge in edges if not unrecorded(run, edge, [iteration]))


def partly(
    run: Path, edge: str, missing: Mapping[int, int], *, fewer: int | None = None
) -> Finding:
    """The finding for iterations of an edge that are not recorded, or not whole.

    The rows of so many `fewer` iterations would be there.
    """
    there = recorded(run)
    absent = [number for number, rows in missing.items() if not rows]
    some = [number for number, rows in missing.items() if rows]
    got = [f"nothing of {said_iterations(absent)}"] if absent else []
    got += [f"{missing[some[0]]} rows of iteration {some[0]}, and not all"] if some else []
    if edge not in there:
        got = [f"rows of {known_names(list(there))}" if there else "no recorded rows at all"]
    return Finding(
        code="E335",
        what=f"{run} has not recorded all rows of {edge} in {said_iterations([*missing])}",
        got="; ".join(got),
        expected="every row of it; by default a run keeps those of a few groups",
        near=near_names(edge, there) if edge not in there else (),
        fix=f"{f'--iterations {fewer}, or ' if fewer else ''}run it with --record {edge}",
    )


def said_iterations(iterations: Collection[int]) -> str:
    """Iterations in words: a few by number, more by the first and the last."""
    listed = sorted(iterations)
    if len(listed) == 1:
        return f"iteration {listed[0]}"
    if len(listed) <= NAMED:
        return f"iterations {', '.join(map(str, listed))}"
    return f"{len(listed)} iterations from {listed[0]} to {listed[-1]}"


def field_findings(
    run: Path, node: Node, edge: str, iteration: int, wanted: Collection[str]
) -> Iterator[Finding]:
    """E336 for fields that somebody reads and a record lacks, or has of another type."""
    _, _, metadata = _footer(_files(run, edge)[iteration][0])
    dtypes, shapes = json.loads(metadata[DTYPES]), json.loads(metadata[SHAPES])
    for field in node.op.outputs:
        if field.name not in wanted:
            continue
        there = field.name in dtypes
        got = _typed(dtypes[field.name], shapes[field.name]) if there else "no such field"
        expected = _typed(*_contract(field))
        if got != expected:
            yield Finding(
                code="E336",
                what=f"{edge} in {run}: field {field.name!r} is not as the graph declares it",
                where=node.where,
                got=got if there else f"{got}; {known_names(sorted(dtypes))}",
                expected=f"{field.name}: {expected}",
                near=() if there else near_names(field.name, dtypes),
            )


def _contract(field: Field) -> tuple[str, list[int | None]]:
    """The dtype and the dimensions after the rows that a declared field has."""
    if field.dtype == "text":
        return TEXT, []
    ragged: list[int | None] = [None] if field.level == "token" else []
    return field.dtype, ragged if field.width is None else [*ragged, field.width]


def _typed(dtype: str, shape: Iterable[int | None]) -> str:
    sizes = ["rows", *("tokens" if size is None else str(size) for size in shape)]
    return f"{dtype}[{', '.join(sizes)}]"


def _files(run: Path, edge: str) -> dict[int, list[Path]]:
    """The files of an edge by the iteration they are of."""
    found: dict[int, list[Path]] = {}
    directory = edge_directory(run, edge)
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        for iteration in recorded_span(path.name) or ():
            found.setdefault(iteration, []).append(path)
    return found


def _footer(path: Path) -> tuple[int, About, Mapping[bytes, Any]]:
    """How many rows a file has, what it says of itself, and its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata
            about = About.decoded(metadata)
            count = file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        got = str(error).splitlines()[0]
        what = f"{path} cannot be read"
        raise RunDirError(Finding(code="E733", what=what, got=got)) from None
    if about is None:
        raise RunDirError(Finding(code="E733", what=f"{path} is no recorded edge"))
    return count, about, metadata
