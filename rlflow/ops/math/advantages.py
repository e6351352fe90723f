"""Advantage estimators, all in one place to import from.

The formulas are in `group_advantages` (one number a row), `token_advantages` (one a token),
`groups` (statistics of groups) and `shaping` (rewards that follow from a length).
"""

from __future__ import annotations

from rlflow.ops.math.group_advantages import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
)
from rlflow.ops.math.groups import degenerate
from rlflow.ops.math.shaping import overlong_penalty
from rlflow.ops.math.token_advantages import (
    gae,
    optimal_token_baseline,
    reinforce_pp,
    remax,
    token_rewards,
)

__all__ = [
    "degenerate",
    "dr_grpo",
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "opo",
    "optimal_token_baseline",
    "overlong_penalty",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "token_rewards",
]
