"""The body that brings fields of other rows to those of the same key; it has all rows of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.batch import is_ragged, select_field, strings
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.body import Call, Output

SHOWN = 3


def join(call: Call) -> Output:
    """For every row the fields of the other row with its key, or the number that fills them."""
    rows, other, params = inputs_of(call), call.others[0], call.params
    keys, known = _keys(rows[params["by"]]), _keys(other[params["by"]])
    places: dict[Any, int] = {}
    for place, key in enumerate(known):
        places.setdefault(key, place)
    if len(places) < len(known) and params.get("several") != "first":
        twice = [key for place, key in enumerate(known) if places[key] != place]
        raise RunError(_unmatched(call, twice, "several rows of one key", 'several="first"'))
    index = torch.tensor([places.get(key, -1) for key in keys], dtype=torch.int64)
    lacking = index < 0
    fill = dict(params["fill"].values) if "fill" in params else {}
    wanted = sorted(call.wanted)
    if bool(lacking.any()) and (not set(wanted) <= set(fill) or not known):
        absent = [key for key in keys if key not in places]
        raise RunError(_unmatched(call, absent, "no row of a key", f"fill={{{wanted[0]!r}: 0.0}}"))
    fields = {name: select_field(other[name], index.clamp(min=0)) for name in wanted}
    for name in wanted if bool(lacking.any()) else ():
        fields[name] = fields[name].masked_fill(lacking, fill[name])
    return Output(fields=fields, rows=num_rows(rows))


def _keys(field: Tensor) -> list[Any]:
    """The keys as Python values; text as it reads."""
    found: list[Any] = strings(field) if is_ragged(field) else field.tolist()
    return found


def _unmatched(call: Call, keys: list[Any], what: str, fix: str) -> Finding:
    shown = ", ".join(f"{key!r:.60}" for key in keys[:SHOWN])
    return Finding(
        code="E791",
        what=f"{call.node}: the other rows have {what}, in iteration {call.iteration}",
        where=call.where,
        got=f"{call.params['by']} {shown}"
        + (f" and {len(keys) - SHOWN} more" * (len(keys) > SHOWN)),
        expected="one row for every key of the rows that are joined",
        fix=fix,
    )
