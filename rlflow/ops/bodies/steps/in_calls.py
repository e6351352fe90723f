"""One optimizer step whose rows come in several calls: each adds gradients, the last one steps.

How many tokens and rows the step has is known in its last call. Until then losses are divided by
powers of two that are near, which costs no digits; what they are to be divided by is put right at
the end, of gradients by the scale of the step, of each metric by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rlflow.batch import Batch
from rlflow.contract.values import LossFunction, StepResult
from rlflow.ops.bodies.common import model_of, total_rows
from rlflow.ops.body import Call
from rlflow.ops.losses.base import Count, Loss
from rlflow.ops.math.aggregate import Totals

LARGEST = "_max"


@dataclass(slots=True)
class BegunStep:
    """A step that has rows to come: what losses are `divided` by, and what was `found` so far."""

    divided: Totals
    found: Totals
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: dict[str, float]) -> None:
        """Add the metrics of some rows."""
        for name, value in metrics.items():
            if name in self.metrics and name.endswith(LARGEST):
                self.metrics[name] = max(self.metrics[name], value)
            else:
                self.metrics[name] = self.metrics.get(name, 0.0) + value

    def share(self, counted: Count) -> float:
        """What is divided by a count so far, times this, is divided by that of the whole step."""
        if not counted:
            return 1.0
        whole = getattr(self.found, counted)
        return float(getattr(self.divided, counted) / whole) if whole else 1.0

    def whole(self, spec: Loss) -> dict[str, float]:
        """The metrics of the whole step."""
        made = {}
        for name, value in self.metrics.items():
            if name.endswith(LARGEST):
                made[name] = value if math.isfinite(value) or self.found.tokens else 0.0
            else:
                made[name] = value * self.share(spec.counted(name))
        return made


def in_calls(call: Call) -> bool:
    """Whether the rows of one optimizer step come in several calls."""
    return call.piece[1] > 1 and call.params["mini_batches"] == 1


def step_in_calls(
    call: Call,
    spec: Loss,
    rows: Batch,
    totals: Totals,
    loss: Callable[[Totals], LossFunction],
) -> tuple[StepResult, Totals] | None:
    """Add the gradients of this call's rows; in the last call the step, and what it covers.

    `totals` are those of this call's rows, over all parts; `loss` makes the loss of micro-batches
    of a step that covers so much.
    """
    model, goes_on = model_of(call), call.piece[0] > 0
    if not goes_on:
        call.carried["begun"] = BegunStep(_near(call, totals), Totals(tokens=0.0, rows=0.0))
    begun: BegunStep = call.carried["begun"]
    begun.add(
        model.accumulate(
            rows,
            loss(begun.divided),
            outputs=spec.outputs(),
            temperature=call.params.get("temperature", 1.0),
            goes_on=goes_on,
        )
    )
    begun.found = begun.found + totals
    if call.piece[0] + 1 < call.piece[1]:
        return None
    scale = begun.share(spec.counted())
    done = model.finish(begun.whole(spec), call.params["max_grad_norm"], scale)
    return done, begun.found


def _near(call: Call, first: Totals) -> Totals:
    """About what a step covers whose first rows cover so much, as powers of two."""
    rows = max(total_rows(call), 1)
    tokens = rows * first.tokens / first.rows if first.rows else rows
    return Totals(tokens=_power(tokens), rows=_power(rows))


def _power(count: float) -> float:
    """The power of two that is nearest, 1 at the least."""
    return 2.0 ** round(math.log2(max(count, 1.0)))
