"""The learning rate as a function of the step, alike for every optimizer."""

from __future__ import annotations

import math

from rlflow.contract.engines import OptimizerSpec
from rlflow.errors import Finding, UsageError, near_names

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(spec: OptimizerSpec, k: int) -> float:
    """The rate of optimizer step `k`, counted from 0, in units of the weights per step.

    Rises linearly over `warmup_steps`, then stays, or falls linearly or as half a cosine to
    `min_lr_ratio * lr` at `total_steps`. Raises UsageError for a schedule without an end.
    """
    if k < spec.warmup_steps:
        return spec.lr * (k + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    if spec.schedule not in SCHEDULES:
        what = f"there is no learning-rate schedule {spec.schedule!r}"
        near = near_names(spec.schedule, SCHEDULES)
        raise UsageError(Finding(code="E513", what=what, expected=", ".join(SCHEDULES), near=near))
    if spec.total_steps <= spec.warmup_steps:
        raise UsageError(
            Finding(
                code="E513",
                what=f"the {spec.schedule} schedule has no steps between warm-up and end",
                got=f"warmup_steps={spec.warmup_steps}, total_steps={spec.total_steps}",
                expected="total_steps above warmup_steps",
            )
        )
    part = min(1.0, (k - spec.warmup_steps) / (spec.total_steps - spec.warmup_steps))
    fall = 1 - part if spec.schedule == "linear" else (1 + math.cos(math.pi * part)) / 2
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * fall)
