"""The body of every `@rf.op`: calls the user's function as its granularity says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    concat_rows,
    flat,
    is_ragged,
    lengths,
    make_batch,
    ragged,
    ragged_like,
    select_rows,
)
from rlflow.errors import Finding, RunError
from rlflow.graph.fields import Field
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.body import Call, Output


def call(call: Call) -> Output:
    """Run the function on all rows, or group by group where the op is per group.

    The function gets copies, for what it is given may be read by others or not be writable; a
    part without rows does not call it.
    """
    inputs = inputs_of(call)
    if not num_rows(inputs):
        return Output(fields={made.name: _no_rows(made) for made in call.op.outputs})
    if call.op.per != "group":
        made = _made(call, _copy(inputs))
        return Output(fields=dict(made), rows=num_rows(inputs))
    groups = inputs["group"]
    order = torch.argsort(groups, stable=True)
    sizes = torch.unique_consecutive(groups[order], return_counts=True)[1]
    parts = []
    for rows in torch.split(order, sizes.tolist()):
        part = select_rows(inputs, rows)
        parts.append(make_batch(_made(call, part), len(rows)))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    joined = select_rows(concat_rows(parts), back)
    return Output(fields=dict(joined.items()), rows=num_rows(inputs))


def _made(call: Call, inputs: Batch) -> Mapping[str, Tensor]:
    """The function's result by field name, checked against the rows it was given."""
    function = call.op.function
    if function is None:
        raise AssertionError(f"node {call.node} has no function")
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    names = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind != keyword_only
    ]
    try:
        result = function(*(inputs.get(name, None) for name in names), **call.params)
    except Exception as error:
        raise RunError(
            Finding(
                code="E642",
                what=f"op {function.__name__} ({call.node}) raised {type(error).__name__}: {error}",
                where=call.where,
            )
        ) from error
    named = result if isinstance(result, Mapping) else {call.outputs[0]: result}
    return {name: _checked(call, name, named.get(name), num_rows(inputs)) for name in call.outputs}


def _copy(batch: Batch) -> Batch:
    fields = {
        name: ragged_like(flat(field).clone(), field) if is_ragged(field) else field.clone()
        for name, field in batch.items()
    }
    return make_batch(fields, num_rows(batch))


def _no_rows(made: Field) -> Tensor:
    """A field of no rows."""
    none = torch.empty(0, dtype=getattr(torch, made.dtype))
    return ragged(none, torch.empty(0, dtype=torch.int64)) if made.level == "token" else none


def _checked(call: Call, name: str, value: Any, rows: int) -> Tensor:
    if isinstance(value, Tensor):
        count = len(lengths(value)) if is_ragged(value) else (len(value) if value.ndim else -1)
        if count == rows:
            return value
        got = f"a tensor of shape {tuple(value.shape)}"
    else:
        got = f"{type(value).__name__}: {value!r:.80}"
    raise RunError(
        Finding(
            code="E643",
            what=f"op {call.node} made no field {name!r} of {rows} rows",
            where=call.where,
            got=got,
            expected=f"a tensor with {rows} rows",
        )
    )
