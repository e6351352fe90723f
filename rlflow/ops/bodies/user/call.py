"""The body of every `@rf.op`: calls the user's function as its granularity says."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    concat_rows,
    flat,
    is_ragged,
    make_batch,
    ragged,
    ragged_like,
    select_rows,
    strings,
    text,
)
from rlflow.errors import Finding, RunError, error_text
from rlflow.graph.callables import name_of, parameters_of
from rlflow.graph.fields import Field
from rlflow.graph.user.op import BEGINS
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.bodies.user.made import checked_field
from rlflow.ops.bodies.user.models import Using
from rlflow.ops.body import Call, Output


def call(call: Call) -> Output:
    """Run the function on all rows, or group by group where the op is per group.

    The function gets copies, for what it is given may be read by others or not be writable; a
    part without rows does not call it, unless it uses a model that several ranks may hold.
    """
    inputs = inputs_of(call)
    if not num_rows(inputs) and call.op.use is None:
        return Output(fields={made.name: _no_rows(made) for made in call.op.outputs})
    if call.op.per != "group":
        made = _made(call, _copy(inputs))
        return Output(fields=dict(made), rows=num_rows(inputs))
    groups = inputs["group"]
    order = torch.argsort(groups, stable=True)
    sizes = torch.unique_consecutive(groups[order], return_counts=True)[1]
    parts: list[Batch] = []
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
    parameters = parameters_of(function)
    names = [p.name for p in parameters if p.kind != keyword_only]
    told = {"iteration": call.iteration} if "iteration" in {p.name for p in parameters} else {}
    told = {} if "iteration" in names else told
    given: dict[str, Any] = {name: inputs.get(name, None) for name in names}
    texts = [w.name for w in call.op.inputs if w.as_list and given.get(w.name) is not None]
    given |= {name: strings(given[name]) for name in texts}
    options, state = _options(call)
    try:
        given |= {names[0]: Using(call)} if call.op.use is not None else {}
        own = {p.name for p in parameters if p.kind == keyword_only}
        options = {key: value for key, value in options.items() if key in own}
        result = function(*given.values(), **{**told, **options})
    except RunError:
        raise
    except Exception as error:
        raise RunError(
            Finding(
                code="E642",
                what=f"op {name_of(function)} ({call.node}) raised {error_text(error)}",
                where=call.where,
            )
        ) from error
    if state is not None:
        _keep(call, state)
    if not call.outputs:
        return {}
    named = result if isinstance(result, Mapping) else {call.outputs[0]: result}
    return {made.name: checked_field(call, made, named, inputs) for made in call.op.outputs}


def _options(call: Call) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The function's keyword options, and the state among them if it has one."""
    options = {name: v for name, v in call.params.items() if name not in ("state", BEGINS)}
    if BEGINS not in call.params:
        return options, None
    state: dict[str, Any] = dict(call.params[BEGINS]) | call.state
    return {**options, "state": state}, state


def _keep(call: Call, state: Mapping[str, Any]) -> None:
    """Take the state that the function has left; RunError unless it is finite numbers."""
    try:
        kept = {str(name): float(value) for name, value in state.items()}
    except (TypeError, ValueError):
        kept = {}
    if len(kept) != len(state) or not all(map(math.isfinite, kept.values())):
        raise RunError(
            Finding(
                code="E657",
                what=f"op {call.node} left a state that cannot be kept",
                where=call.where,
                got=f"{dict(state)!r:.200}",
                expected="finite numbers by name",
            )
        )
    call.state.clear()
    call.state.update(kept)


def _copy(batch: Batch) -> Batch:
    fields = {
        name: ragged_like(flat(field).clone(), field) if is_ragged(field) else field.clone()
        for name, field in batch.items()
    }
    return make_batch(fields, num_rows(batch))


def _no_rows(made: Field) -> Tensor:
    """A field of no rows."""
    if made.dtype == "text":
        return text([])
    none = torch.empty(0, dtype=getattr(torch, made.dtype))
    return ragged(none, torch.empty(0, dtype=torch.int64)) if made.level == "token" else none
