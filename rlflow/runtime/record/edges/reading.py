"""Recorded edges, read back: which there are, and the rows of one. Imports no torch for a table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import Finding, RunDirError, near_names
from rlflow.runtime.record.edges.names import (
    ABOUT,
    DTYPES,
    FORMAT,
    ITERATION,
    RECORDS,
    SHAPES,
    About,
    edge_directory,
    node_of,
    recorded_span,
)

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of a file that is kept in memory for whoever reads the iteration after.
SMALL = 8 * 2**20


def recorded(run: Path) -> dict[str, list[int]]:
    """The iterations of each node of which a run has recorded rows, ascending, by node."""
    found = {}
    for directory in sorted((run / RECORDS).glob("*/")):
        spans = {recorded_span(entry.name) for entry in directory.iterdir()}
        if iterations := sorted({number for span in spans if span for number in span}):
            found[node_of(directory)] = iterations
    return found


def read_edge(run: Path, node: str, iteration: int, *, columns: Sequence[str] | None = None) -> Any:
    """The recorded rows of a node in an iteration, as a `pyarrow.Table` in the order of `row`.

    Files of several ranks are joined; one that is torn is left out, and `read_about` says how
    many rows there were. `columns` takes some alone. Raises RunDirError E732 where nothing is
    recorded, E733 where no file can be read, or one is of a later version.
    """
    import pyarrow as pa

    tables, problems = [], []
    for path in _files(run, node, iteration):
        try:
            tables.append(_read(path, iteration, columns))
        except (OSError, pa.ArrowException) as error:
            problems.append(f"{path.name}: {str(error).splitlines()[0]}")
    if not tables:
        where = edge_directory(run, node)
        what = f"no file of iteration {iteration} of {node} in {where} can be read"
        raise RunDirError(Finding(code="E733", what=what, got="; ".join(problems)))
    joined = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    joined = joined.replace_schema_metadata(tables[0].schema.metadata)
    row = joined.column("row").to_numpy()
    if len(row) > 1 and (row[1:] <= row[:-1]).any():
        joined = joined.take(_in_order(row))
    return joined


def about(table: Any) -> About:
    """What a table of `read_edge` says of itself."""
    found = About.decoded(table.schema.metadata)
    assert found is not None, "every table of read_edge is a recorded edge"
    return found


def is_whole(table: Any) -> bool:
    """Whether a table has all rows that its node made in the iteration."""
    return bool(len(table) == about(table).total)


def recorded_tensors(table: Any) -> dict[str, Tensor]:
    """The fields of a recorded edge as the tensors that they were, by name; imports torch.

    A token field is jagged `[rows, j]`, text ragged uint8 bytes, as in any batch.
    """
    from rlflow.runtime.record.edges.columns import Column, field_of

    dtypes = json.loads(table.schema.metadata[DTYPES])
    shapes = json.loads(table.schema.metadata[SHAPES])
    return {
        name: field_of(Column(values=table.column(name), dtype=dtype, shape=tuple(shapes[name])))
        for name, dtype in dtypes.items()
        if name in table.column_names
    }


def _files(run: Path, node: str, iteration: int) -> list[Path]:
    """The files of an iteration; raises RunDirError E732 where there is none."""
    directory = edge_directory(run, node)
    names = [entry.name for entry in os.scandir(directory)] if directory.is_dir() else []
    files = [directory / n for n in sorted(names) if iteration in (recorded_span(n) or ())]
    if files:
        return files
    known = recorded(run)
    if node not in known:
        raise RunDirError(
            Finding(
                code="E732",
                what=f"{run} has no recorded rows of {node!r}",
                got=f"rows of {', '.join(known)}" if known else "no recorded rows at all",
                near=near_names(node, known),
                fix=f"rlflow run PIPELINE --record {node}",
            )
        )
    nearest = min(known[node], key=lambda each: abs(each - iteration))
    raise RunDirError(
        Finding(
            code="E732",
            what=f"{run} has no recorded rows of {node!r} in iteration {iteration}",
            got=f"{len(known[node])} iterations from {known[node][0]} to {known[node][-1]}",
            near=(str(nearest),),
        )
    )


def _read(path: Path, iteration: int, columns: Sequence[str] | None) -> Any:
    """The rows of an iteration in one file; `row` and `group` are always read."""
    wanted = None if columns is None else frozenset(columns)
    stat = path.stat()
    small = stat.st_size <= SMALL
    load = _loaded if small else _loaded.__wrapped__
    table, found = load(path, stat.st_mtime_ns, wanted)
    places = found.places(len(table))[iteration]
    alone = table.slice(places.start, len(places)) if found.parts else table
    metadata = {**table.schema.metadata, ABOUT: found.of(iteration).encoded()}
    return alone.replace_schema_metadata(metadata)


@lru_cache(maxsize=8)
def _loaded(path: Path, stamp: int, columns: frozenset[str] | None) -> tuple[Any, About]:
    """A whole file and what it says of itself; small ones are kept for the next iteration."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        found = About.decoded(file.schema_arrow.metadata)
        if found is None or found.format > FORMAT:
            got = "no metadata of rlflow" if found is None else f"format {found.format}"
            what = f"{path} is no record that this version of rlflow reads"
            raise RunDirError(
                Finding(code="E733", what=what, got=got, expected=f"format {FORMAT} or earlier")
            )
        wanted = {"row", "group", *(names if columns is None else columns)}
        if found.parts and ITERATION not in json.loads(file.schema_arrow.metadata[DTYPES]):
            wanted.discard(ITERATION)
        return file.read(columns=[name for name in names if name in wanted]), found


def _in_order(row: Any) -> Any:
    """The places of rows in ascending order, each row once."""
    import numpy as np
    import pyarrow as pa

    return pa.array(np.unique(row, return_index=True)[1])
