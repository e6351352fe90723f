"""Which tokens keep their policy term: responses close enough to their policy, uncertain tokens.

What is dropped still counts in the averages, and keeps its KL and entropy terms. Shapes and
masks as in `clipped`. This file knows no loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.ops.math.losses.sequence import row_mean
from rlflow.ops.math.masked import per_token, select

ROUNDING = 1e-5


@torch.no_grad()
def near_policy(
    log_probs: Tensor, sampled_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): kept, bool.

    A token is kept if `A >= 0`, or if `mean_t (sampled_log_probs - log_probs)` over its row is
    at most `limit`: only what should become less likely, and has, is dropped. `advantages`
    `[rows]` or `[rows, tokens]`; the result `[rows, tokens]`, false where masked.

    Others: TRL takes the rollout's log-probs, as here by default; slime the old policy's, with
    a limit of 1e-4.
    """
    apart = row_mean(sampled_log_probs - log_probs, mask)
    gain = select(per_token(advantages), mask)
    return ((gain >= 0) | (apart <= limit)) & mask


@torch.no_grad()
def top_entropy(entropy: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """The `share` of the unmasked tokens that has the highest entropy (arXiv:2506.01939), bool.

    Kept is an entropy of at least the quantile `1 - share` of all tokens of the optimizer step,
    interpolated linearly between neighbours; so one tensor, of any shape, has to hold them all.
    1e-5 nats below still count: the first tokens of all samples of a prompt have one entropy,
    and rounding may not part them. A share of 0.2 is the paper's. An entropy that is not finite
    is not ranked and its token not kept: it says nothing of the others.

    Others: the same in TRL (`top_entropy_quantile`), there of one micro-batch on every rank.
    """
    known = mask & entropy.isfinite()
    values = entropy[known].double().sort().values
    if not len(values):
        return torch.zeros_like(mask)
    place = (1.0 - share) * (len(values) - 1)
    below = min(int(place), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    quantile = torch.lerp(values[below], values[above], place - below)
    return select(entropy.double() >= quantile - ROUNDING, known, False)
