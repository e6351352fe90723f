"""Drafters: small models that propose what a policy is likely to sample.

Contracts only. A drafter never changes what is sampled, only how fast; so it is trained in the
background, in whatever time its devices have left.
"""

from __future__ import annotations

from typing import Any

from rlflow.errors import Finding
from rlflow.graph.model import Model
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, report_finding
from rlflow.ops.losses.losses import SFTLoss
from rlflow.ops.models import update


def train_drafter(
    drafter: Model,
    samples: Handle,
    *,
    steps: int = 4,
    max_grad_norm: float | None = 1.0,
    name: str | None = None,
) -> Handle:
    """Train a drafter on the tokens that its policy has sampled, in `steps` optimizer steps.

    The loss is the cross entropy of the response tokens, each step on the next part of the rows
    (Leviathan et al. 2023, section 3.5, distil a drafter for a fixed policy; here it follows a
    policy that learns). Each step is an action of its own, which the compiler puts where the
    devices of `drafter.train` would be idle. Rollouts read the drafter of the iteration before, so
    none waits for it. In iteration i this writes version i + 1 of the drafter.
    """
    if steps < 1:
        where = declared_at()
        got = f"a drafter trained in {steps} steps"
        report_finding(Finding(code="E118", what=got, where=where, expected="steps >= 1"))
    options: dict[str, Any] = {"mini_batches": steps, "shuffle": steps <= 1}
    return update(
        drafter,
        samples,
        loss=SFTLoss(),
        max_grad_norm=max_grad_norm,
        name=name,
        background=True,
        **options,
    )
