"""What a user's op returned, held against the fields that it says it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import Batch, is_ragged, lengths, text
from rlflow.errors import Finding, RunError, known_names, near_names
from rlflow.graph.callables import code_of
from rlflow.graph.fields import Field
from rlflow.ops.bodies.common import num_rows
from rlflow.ops.body import Call

PYTHON = {"float32": "float", "int64": "long", "bool": "bool"}


def checked_field(call: Call, made: Field, named: Mapping[str, Any], inputs: Batch) -> Tensor:
    """A field of what a function returned, as it was declared.

    A number of another width is converted. Raises RunError (E643) for a field that is not there,
    and for another number of rows, shape, kind of number or lengths of rows.
    """
    rows, name = num_rows(inputs), made.name
    what = f"op {call.node} made no field {name!r} of {rows} rows"
    value = named.get(name)
    if name not in named:
        near = near_names(name, named)
        got = f"fields {known_names(sorted(map(str, named)))}"
        raise _wrong(call, what, got, f"a field {name!r}", near=near)
    if made.dtype == "text":
        return _text(call, name, value, rows)
    if not isinstance(value, Tensor):
        raise _wrong(
            call, what, f"{type(value).__name__}: {value!r:.80}", f"a tensor with {rows} rows"
        )
    count = len(lengths(value)) if is_ragged(value) else (len(value) if value.ndim else -1)
    if count != rows:
        raise _wrong(
            call, what, f"a tensor of shape {tuple(value.shape)}", f"a tensor with {rows} rows"
        )
    _check_shape(call, made, value, inputs)
    return _converted(call, made, value)


def _text(call: Call, name: str, value: Any, rows: int) -> Tensor:
    """A text field of one string a row."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == rows:
        wrong = next((each for each in value if not isinstance(each, str)), None)
        if wrong is None:
            return text(value)
        got = f"{type(wrong).__name__}: {wrong!r:.80}, in one of {rows} rows"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        got = f"{len(value)} of them"
    else:
        got = f"{type(value).__name__}: {value!r:.80}"
    what = f"op {call.node} made no text {name!r} of {rows} rows"
    raise _wrong(call, what, got, f"a list of {rows} strings")


def _check_shape(call: Call, made: Field, value: Tensor, inputs: Batch) -> None:
    """One value a row, or one a token of the rows that the op reads."""
    what = f"op {call.node} made field {made.name!r} in another shape than it says"
    if made.level == "row":
        if is_ragged(value) or value.ndim != 1:
            shape = "rows of tokens" if is_ragged(value) else f"shape {tuple(value.shape)}"
            raise _wrong(call, what, shape, f"one value a row: shape ({len(value)},)")
        return
    if not is_ragged(value):
        expected = "a value for each token: a jagged tensor such as the op's own token inputs"
        raise _wrong(call, what, f"shape {tuple(value.shape)}", expected)
    like = next((n for n in _token_inputs(call) if inputs.get(n, None) is not None), None)
    if like is not None and not torch.equal(lengths(value).cpu(), lengths(inputs[like]).cpu()):
        got = f"rows of {_few(lengths(value))} tokens"
        raise _wrong(call, what, got, f"those of {like}: {_few(lengths(inputs[like]))} tokens")


def _token_inputs(call: Call) -> list[str]:
    """Token fields that the op reads; those of responses."""
    tokens = [wanted.name for wanted in call.op.inputs if wanted.levels[0] == "token"]
    return [name for name in tokens if name != "prompt_tokens"]


def _few(counts: Tensor) -> str:
    return ", ".join(map(str, counts.tolist()[:6])) + (", ..." if len(counts) > 6 else "")


def _converted(call: Call, made: Field, value: Tensor) -> Tensor:
    wanted: torch.dtype = getattr(torch, made.dtype)
    kinds = [
        (kind.is_floating_point, kind == torch.bool, kind.is_complex)
        for kind in (value.dtype, wanted)
    ]
    if kinds[0] == kinds[1]:
        return value.to(wanted)
    what = f"op {call.node} made field {made.name!r} of another type than it says"
    fix = f"{made.name}.{PYTHON.get(made.dtype, 'float')}()"
    raise _wrong(call, what, str(value.dtype), str(wanted), fix=fix)


def _wrong(
    call: Call,
    what: str,
    got: str,
    expected: str,
    *,
    near: tuple[str, ...] = (),
    fix: str = "",
) -> RunError:
    code = code_of(call.op.function) if call.op.function is not None else None
    place = f", in {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    finding = Finding(
        code="E643",
        what=what,
        where=call.where,
        got=got,
        expected=f"{expected}{place}",
        near=near,
        fix=fix,
    )
    return RunError(finding)
