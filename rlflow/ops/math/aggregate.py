"""From a number per token to one loss, with the normalisers of a whole optimizer step.

    mode                     value
    token-mean               sum of all tokens / tokens
    token-sum                sum of all tokens
    seq-mean-token-sum       sum over rows of the row's sum / rows
    seq-mean-token-mean      sum over rows of the row's mean / rows
    seq-mean-token-sum-norm  sum over rows of the row's sum / rows / constant

`tokens` and `rows` are counted over everything one optimizer step covers, all micro-batches
and ranks, before the first backward. The losses of the micro-batches then *add up* to the
loss of the whole batch, and so do their gradients, however it was cut; where a backend
averages gradients over D ranks, the caller multiplies by D. `rows` counts every row, also
one without an unmasked token.

This file knows neither losses nor how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rlflow.ops.math.masked import select


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What one optimizer step covers: unmasked `tokens`, and `rows` with or without any.

    `sums` are other sums over the whole step, by name, that a loss has asked for.
    """

    tokens: float
    rows: float
    sums: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        """The totals of two parts together."""
        names = dict.fromkeys((*self.sums, *other.sums))
        return Totals(
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            sums={n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in names},
        )


def count(mask: Tensor) -> Totals:
    """The totals of one mask, bool `[rows, tokens]`; parts are added with `+`."""
    return Totals(tokens=float(mask.sum()), rows=float(len(mask)))


def aggregate(
    token_values: Tensor,
    mask: Tensor,
    totals: Totals,
    *,
    mode: str,
    constant: float | None = None,
) -> Tensor:
    """The share of the loss of one part, a scalar: the shares of all parts sum to the whole.

    `token_values` and `mask` are `[rows, tokens]`; `constant` is read by
    `seq-mean-token-sum-norm` only (Dr.GRPO: the longest response allowed). Totals of zero
    give 0 with zero gradient, so an empty step still takes part in a collective.
    """
    values = select(token_values, mask)
    match mode:
        case "token-mean":
            return _share(values.sum(), totals.tokens)
        case "token-sum":
            return values.sum()
        case "seq-mean-token-sum":
            return _share(values.sum(), totals.rows)
        case "seq-mean-token-mean":
            lengths = mask.sum(-1).clamp(min=1)
            return _share((values.sum(-1) / lengths).sum(), totals.rows)
        case "seq-mean-token-sum-norm":
            assert constant is not None, "seq-mean-token-sum-norm divides by a constant"
            return _share(values.sum(), totals.rows * constant)
    raise ValueError(f"no aggregation is called {mode!r}")


def token_mean(token_values: Tensor, totals: Totals) -> Tensor:
    """Share of a mean over tokens of values that are already 0 where masked."""
    return _share(token_values.sum(), totals.tokens)


def _share(part: Tensor, total: float) -> Tensor:
    """`part / total`, and 0 with zero gradient where there is nothing to share."""
    return part / total if total else part * 0.0
