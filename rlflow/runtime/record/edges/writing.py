"""One file of recorded rows, of one iteration or several: whole or not at all.

Nothing is synchronised with the disk, for a run does not wait for its record; a file that a
machine's end has torn is left out by whoever reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.runtime.record.durable import fault, register_faults, temporary_name
from rlflow.runtime.record.edges.names import (
    ABOUT,
    DTYPES,
    ITERATION,
    SHAPES,
    About,
    edge_directory,
    rank_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

register_faults("record:write", "record:rename")


def edge_table(
    about: About,
    fields: Mapping[str, Tensor],
    rows: NDArray[np.int64],
    *,
    groups: NDArray[np.int64] | None = None,
    texts: Collection[str] = (),
) -> Any:
    """A `pyarrow.Table` of a node's rows.

    `rows` int64 `[rows]` are their numbers in the node's whole output; `groups` int64 `[rows]`
    stand for a field `group` where the node makes none. `texts` names the fields that are text.
    Rows of several iterations are below each other as `about` says, and have their number beside.
    """
    import numpy as np
    import pyarrow as pa

    from rlflow.runtime.record.edges.arrow import arrow_numbers
    from rlflow.runtime.record.edges.columns import as_column

    columns = {name: as_column(field, text=name in texts) for name, field in fields.items()}
    arrays = {"row": arrow_numbers(rows)}
    if about.parts and ITERATION not in fields:
        numbers, counts = zip(*((number, count) for number, count, _ in about.parts), strict=True)
        arrays[ITERATION] = arrow_numbers(np.repeat(np.asarray(numbers, np.int64), counts))
    if groups is not None and "group" not in fields:
        arrays["group"] = arrow_numbers(groups)
    ordered = sorted(columns, key=lambda name: name != "group")
    arrays |= {name: columns[name].values for name in ordered}
    dtypes = {name: column.dtype for name, column in columns.items()}
    shapes = {name: list(column.shape) for name, column in columns.items()}
    metadata = {
        ABOUT: about.encoded(),
        DTYPES: json.dumps(dtypes, sort_keys=True).encode(),
        SHAPES: json.dumps(shapes, sort_keys=True).encode(),
    }
    return pa.table(arrays).replace_schema_metadata(metadata)


def write_edge(run: Path, table: Any, *, rank: int | None = None) -> int:
    """Write a table of `edge_table`, in the place of an earlier one; returns its bytes on disk.

    Raises `OSError` after removing what it had written.
    """
    import pyarrow.parquet as pq

    about = About.decoded(table.schema.metadata)
    assert about is not None, "only tables of edge_table are recorded edges"
    directory = edge_directory(run, about.node)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / about.file_name(rank)
    temporary = temporary_name(path)
    try:
        # A dictionary would take all NaNs for one.
        pq.write_table(
            table, temporary, compression="zstd", use_dictionary=False, write_statistics=False
        )
        fault("record:write")
        size = temporary.stat().st_size
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fault("record:rename")
    return size


def keep_iterations(path: Path, kept: range) -> None:
    """Put a file of several iterations into the place of one that has more; raises OSError.

    One that cannot be read is removed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except pa.ArrowException:
        path.unlink()
        return
    about = About.decoded(table.schema.metadata)
    assert about is not None, "only files of write_edge are recorded edges"
    left = about.within(kept)
    places = about.places(len(table))
    start, stop = places[left.parts[0][0]].start, places[left.parts[-1][0]].stop
    metadata = {**table.schema.metadata, ABOUT: left.encoded()}
    some = table.slice(start, stop - start).replace_schema_metadata(metadata)
    write_edge(path.parent.parent.parent, some, rank=rank_of(path.name))
    path.unlink()
