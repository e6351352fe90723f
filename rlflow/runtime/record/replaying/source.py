"""The body of a source: rows of an edge as a run has recorded them, in the place of making them.

An ordinary body. Neither the executor nor any other body knows where rows come from.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rlflow.batch import select_field
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import row_numbers, total_rows
from rlflow.ops.body import Call, Output
from rlflow.runtime.record.edges.reading import is_whole, read_edge, recorded_tensors
from rlflow.runtime.record.replaying.present import GROUP, partly


def recorded_rows(call: Call) -> Output:
    """The rows of this iteration, bit for bit: those fields that somebody reads.

    A source that joins rows of another node brings those that are there, by their numbers. Raises
    RunError E335 where not all rows are recorded, E339 where these are not as many as recorded.
    """
    run, edge = Path(call.params["record"]), call.params["edge"]
    wanted = {*call.wanted, *({GROUP} if call.inputs is None else ())}
    table = read_edge(run, edge, call.iteration, columns=sorted(wanted))
    if not is_whole(table):
        raise RunError(partly(run, edge, {call.iteration: len(table)}))
    fields = {name: field for name, field in recorded_tensors(table).items() if name in wanted}
    if call.inputs is None:
        # Nodes that make no group are recorded with that of their rows.
        fields.setdefault(GROUP, torch.from_numpy(table.column(GROUP).to_numpy().copy()))
        return Output(fields=fields, rows=len(table))
    if total_rows(call) != len(table):
        raise RunError(
            Finding(
                code="E339",
                what=f"{edge} of iteration {call.iteration} has other rows than it is joined to",
                where=call.where,
                got=f"{len(table)} rows in {run}, {total_rows(call)} here",
                expected="both from the record of one run",
            )
        )
    rows = row_numbers(call)
    return Output(
        fields={name: select_field(value, rows) for name, value in fields.items()}, rows=len(rows)
    )
