"""The proximal policy where no forward has computed it.

This file knows no losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.ops.math.masked import select


@torch.no_grad()
def loglinear(log_probs: Tensor, behaviour: Tensor, age: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of the proximal policy between those of the behaviour and the current one.

    `behaviour + alpha * (log_probs - behaviour)` with `alpha = age / (age + 1)`; `[rows,
    tokens]`, 0 where masked, without gradient. `age` int64 is how many updates lie between
    the weights that sampled a token and the proximal ones: with v the version that the update
    makes, v - 1 the proximal one and v_b the sampler's, `alpha = (v - 1 - v_b) / (v - v_b)`.
    A token of age 0 has the behaviour policy itself. A negative age counts as 0.

    Source: A-3PO (Li, Wu and Shen 2025, arXiv:2512.06547). Each token has an age of its own,
    since a response may span versions.
    Others: AReaL counts v from the version before the update, so its alpha for a token of age
    a is that of age a - 1 here.
    """
    steps = (
        select(age, mask, 0).clamp(min=0).to(torch.promote_types(log_probs.dtype, torch.float32))
    )
    sampled = select(behaviour, mask)
    return sampled + steps / (steps + 1.0) * select(log_probs - behaviour, mask)
