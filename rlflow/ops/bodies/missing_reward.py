"""The body of an op whose rows may lack a reward: as if the valid rows were all there are.

An estimator's groups, a loss's counts and a mini-batch's rows are those of the valid rows. This
file knows none of them: it takes rows away before another body and puts them back after it.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rlflow.batch import flat, is_ragged, lengths, ragged_like, select_rows
from rlflow.ops.bodies.common import inputs_of, num_rows, row_numbers, total_rows
from rlflow.ops.body import Call, Output
from rlflow.ops.missing_reward import VALID, is_valid

ELSEWHERE = {"pair": -1}


def of_valid_rows(call: Call) -> Output:
    """Run the body named by the option `body` on valid rows; the others get 0, or -1 for `pair`.

    Row values that are not valid are 0, token values 0 over the row's length.
    """
    inputs = inputs_of(call)
    names = [name for name in inputs.keys() if is_valid(name)]  # noqa: SIM118
    valid = functools.reduce(torch.logical_and, [inputs[name] for name in names])
    kept = valid.nonzero().flatten()
    seen = replace(
        call,
        inputs=select_rows(inputs.exclude(*names), kept),
        rows=row_numbers(call)[kept],
        total=total_rows(call),
    )
    body: Callable[[Call], Output] = pkgutil.resolve_name(call.params["body"])
    output = body(seen)
    if not call.op.outputs:
        return output
    like = _response_field(call)
    fields = {
        name: _spread(made, valid, like, ELSEWHERE.get(name, 0))
        for name, made in output.fields.items()
    }
    if VALID in call.wanted:
        fields[VALID] = valid
    return replace(output, fields=fields, rows=num_rows(inputs))


def _response_field(call: Call) -> Tensor | None:
    """A field with the row lengths of the responses, where the op reads one."""
    inputs = inputs_of(call)
    found = [inputs[name] for name in inputs.keys() if name != "prompt_tokens"]  # noqa: SIM118
    return next((f for f in found if is_ragged(f) and f.dtype != torch.uint8), None)


def _spread(made: Tensor, valid: Tensor, like: Tensor | None, elsewhere: int) -> Tensor:
    """A field of the valid rows as one of all rows."""
    if not is_ragged(made):
        whole = torch.full((len(valid),), elsewhere, dtype=made.dtype)
        whole[valid] = made
        return whole
    assert like is not None
    values = flat(made)
    whole = torch.full((len(flat(like)),), elsewhere, dtype=values.dtype)
    whole[valid.repeat_interleave(lengths(like))] = values
    return ragged_like(whole, like)
