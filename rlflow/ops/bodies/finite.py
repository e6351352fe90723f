"""No number that is not finite is learned from: fields are refused, outputs spoil their step.

The one place where that is seen to. What a node reads is there before it begins, so a field that
is not finite ends the run with its name and row (`finite_inputs`). What a forward of the trained
model gives belongs to one optimizer step: there the loss becomes NaN (`spoiled`), so the step is
skipped and counted, whatever a loss, a trust region or a selection makes of the token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.batch import Batch, flat, is_ragged, lengths, row_index
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import MASK, inputs_of, num_rows, row_numbers
from rlflow.ops.body import Call
from rlflow.ops.missing_reward import is_valid

IMPOSSIBLE = frozenset({"top_log_probs", "top_rest", "log_probs_at", "rest_at"})
"""Log-probs of outcomes that nobody has sampled: -inf, probability 0, is one of their values."""


def finite_inputs(call: Call) -> Batch:
    """The input fields of a call, whose numbers are all finite where a token or row counts.

    Rows that are not valid do not. Raises RunError E651 with the first field, row and token.
    """
    batch = inputs_of(call)
    for name in batch.keys():  # noqa: SIM118  a TensorDict iterates over rows
        field = batch[name]
        values = flat(field) if is_ragged(field) else field
        if values.is_floating_point():
            bad = _any_behind(unusable(name, values), 1) & _counted(batch, field)
            if bool(bad.any()):
                raise RunError(_refused(call, name, field, bad))
    return batch


def unusable(name: str, values: Tensor) -> Tensor:
    """Which values of a field cannot be learned from, bool of their shape."""
    found = ~values.isfinite()
    return found & (values != -torch.inf) if name in IMPOSSIBLE else found


def spoiled(loss: Tensor, outputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """The loss, and NaN where a forward gave an unmasked token something that is not finite.

    `outputs` are `[rows, tokens]`, or with more dimensions behind. Gradients stay as they are.
    """
    for name, values in outputs.items():
        bad = _any_behind(unusable(name, values.detach()), 2) & mask
        loss = torch.where(bad.any(), torch.nan, loss)
    return loss


def _any_behind(found: Tensor, dimensions: int) -> Tensor:
    """Whether any is true behind the first dimensions."""
    return found.flatten(dimensions).any(-1) if found.dim() > dimensions else found


def _counted(batch: Batch, field: Tensor) -> Tensor:
    """Which values of a field count: of valid rows, and of a token field those of the mask."""
    names = [name for name in batch.keys() if is_valid(name)]  # noqa: SIM118
    rows = torch.ones(num_rows(batch), dtype=torch.bool)
    for name in names:
        rows = rows & batch[name].cpu()
    if not is_ragged(field):
        return rows.to(field.device)
    tokens = rows.to(field.device).repeat_interleave(lengths(field))
    mask = batch.get(MASK, None)
    same = mask is not None and torch.equal(lengths(mask), lengths(field))
    return tokens & flat(mask) if same else tokens


def _refused(call: Call, name: str, field: Tensor, bad: Tensor) -> Finding:
    places = bad.nonzero().flatten().cpu()
    first = int(places[0])
    rows, where, counted = places, "", ""
    values = flat(field) if is_ragged(field) else field
    if is_ragged(field):
        sizes = lengths(field).cpu()
        rows = row_index(sizes)[places]
        where = f", token {first - int(sizes[: int(rows[0])].sum())}"
        counted = f"{len(places)} token{'s' * (len(places) > 1)} of "
    wrong = values[first].flatten()
    wrong = wrong[unusable(name, wrong)]
    numbers, several = row_numbers(call).cpu(), len(set(rows.tolist()))
    return Finding(
        code="E651",
        what=f"{call.node}: {name} is not finite in iteration {call.iteration}",
        where=call.where,
        got=f"{float(wrong[0])} in row {int(numbers[int(rows[0])])}{where}; in all {counted}"
        f"{several} of {len(numbers)} rows",
        expected="finite numbers: another would spoil the batch, or be left out and nobody see it",
        fix=FIXES.get(name, f"look at what makes {name}; ops.metrics logs its extremes"),
    )


FIXES = {
    "rollout_log_probs": "look at the engine that sampled: its logits, its version, its dtype",
    "reward": 'ops.reward(..., on_error="drop_sample"), or a reward that is finite',
}
