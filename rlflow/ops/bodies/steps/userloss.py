"""The objective of a loss of a user's own (`@rf.loss`), for one micro-batch.

Its function makes one number a token or a row; they are summed here over the counts of the whole
optimizer step, so micro-batches and ranks add up. That holds where a row's loss depends on that
row alone, which is checked: half of the rows have to give what they give among all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.errors import Finding, RunError, error_text
from rlflow.graph.fields import Field
from rlflow.ops.bodies.common import MASK
from rlflow.ops.losses.user import LOSS, FunctionLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.losses.regularise import aggregated
from rlflow.ops.math.masked import select

Fields = Mapping[str, Tensor]

# Of float32 numbers that are added up in another order.
RELATIVE, ABSOLUTE = 1e-4, 1e-6


def objective(
    spec: FunctionLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the loss, and of each metric, detached.

    One loss a token is aggregated as `spec` says; one a row is averaged over the rows of the
    step, 0 for a row without an unmasked token. Raises RunError for a function that raises, that
    makes no such numbers, whose loss carries no gradient, or joins rows.
    """
    mask, made = batch[MASK], {field.name: field for field in spec.signature.made}
    given = {name: _given(spec, name, outputs, batch) for name in spec.signature.parameters}
    results = _called(spec, given, mask)
    _require_rows_apart(spec, given, results, mask)
    found = {name: _unmasked(results[name], made[name], mask) for name in made}
    loss, is_row = found.pop(LOSS), made[LOSS].level == "row"
    if bool(mask.any()) and torch.is_grad_enabled() and not loss.requires_grad:
        raise RunError(_wrong(spec, "carries no gradient", f"no path to {spec.outputs()[0]}"))
    total = loss.sum() / max(totals.rows, 1.0) if is_row else aggregated(spec, loss, mask, totals)
    metrics = {name: _metric(made[name], x.detach(), mask, totals) for name, x in found.items()}
    return total, metrics


def _given(spec: FunctionLoss, name: str, outputs: Fields, batch: Fields) -> Tensor | None:
    """A field as the function declares it: of masked tokens zero, None for one that is not."""
    value = outputs[name] if name in spec.outputs() else batch.get(name)
    if value is None or spec.signature.levels[name] == "row":
        return value
    mask = batch[MASK]
    if value.dim() == 1:
        value = value[:, None].expand(mask.shape)
    if value.shape != mask.shape:
        got = f"{name} of shape {tuple(value.shape)}"
        raise RunError(_wrong(spec, "reads a field of other tokens", got))
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype, device=value.device))


def _called(
    spec: FunctionLoss, given: Mapping[str, Tensor | None], mask: Tensor
) -> dict[str, Tensor]:
    """What the function makes, by name, each of the declared shape."""
    try:
        result = spec.function(*given.values(), **dict(spec.options))
    except Exception as error:
        what = f"raised {error_text(error)}"
        raise RunError(_wrong(spec, what, "")) from error
    named = result if isinstance(result, Mapping) else {LOSS: result}
    for field in spec.signature.made:
        value = named.get(field.name)
        shape = tuple(mask.shape) if field.level == "token" else (len(mask),)
        if not isinstance(value, Tensor):
            got = f"{type(value).__name__}: {value!r:.80}"
        elif tuple(value.shape) != shape:
            got = f"a tensor of shape {tuple(value.shape)}"
        elif field.name == LOSS and not value.is_floating_point():
            got = f"a tensor of dtype {value.dtype}"
        else:
            continue
        what = f"made no {field.name!r} as declared"
        raise RunError(_wrong(spec, what, got, f"{field}, {shape}"))
    return {field.name: named[field.name] for field in spec.signature.made}


@torch.no_grad()
def _require_rows_apart(
    spec: FunctionLoss,
    given: Mapping[str, Tensor | None],
    results: Fields,
    mask: Tensor,
) -> None:
    """Raise RunError where the first half of the rows gives other numbers by itself."""
    half = len(mask) // 2
    if not half:
        return
    own = {name: None if value is None else value[:half] for name, value in given.items()}
    alone = _called(spec, own, mask[:half])
    for field in spec.signature.made:
        together, apart = (
            _unmasked(x[field.name][:half], field, mask[:half]).detach().double()
            for x in (results, alone)
        )
        if not torch.allclose(together, apart, RELATIVE, ABSOLUTE, equal_nan=True):
            gap = float((together - apart).abs().max())
            raise RunError(
                Finding(
                    code="E795",
                    what=f"loss {spec.signature.name!r} makes {field.name!r} of a row depend on "
                    "other rows",
                    where=spec.signature.where,
                    got=f"{gap:.3g} of difference with half of the rows",
                    expected="numbers of a row made of that row alone: micro-batches and ranks "
                    "have other rows beside it, so the gradient would change with them",
                    fix='numbers over all rows are made before: an @rf.op(per="batch")',
                )
            )


def _unmasked(value: Tensor, field: Field, mask: Tensor) -> Tensor:
    """Numbers with zero where the mask is false, or of a row everywhere false."""
    kept = mask if field.level == "token" else mask.any(-1)
    value = value if value.is_floating_point() else value.to(torch.float32)
    return select(value, kept)


def _metric(field: Field, values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """A micro-batch's share of a mean over the step's tokens or rows; or its largest value."""
    kept = mask if field.level == "token" else mask.any(-1)
    if field.name.endswith("_max"):
        if not totals.tokens:
            return values.new_zeros(())
        return torch.cat((values[kept].flatten(), values.new_full((1,), -torch.inf))).amax()
    return token_mean(values, totals) if field.level == "token" else _row_mean(values, totals)


def _row_mean(values: Tensor, totals: Totals) -> Tensor:
    return values.sum() / max(totals.rows, 1.0)


def _wrong(spec: FunctionLoss, what: str, got: str, expected: str = "") -> Finding:
    return Finding(
        code="E794",
        what=f"loss {spec.signature.name!r} {what}",
        where=spec.signature.where,
        got=got,
        expected=expected,
    )
