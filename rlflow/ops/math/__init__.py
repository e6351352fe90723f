"""The bodies of the operators as pure functions of tensors, and nothing else.

The reference form is padded: token tensors `[rows, tokens]` with a bool mask, row tensors
`[rows]`, groups as int64 ids `[rows]`. What stands at a masked position, NaN included,
changes no value and no gradient. Importing this package imports torch; nothing here knows
models, devices, graphs or files.
"""

from __future__ import annotations

from rlflow.ops.math.advantages import gae, grpo, reinforce_pp, rloo, token_rewards
from rlflow.ops.math.aggregate import Totals, aggregate, count, token_mean
from rlflow.ops.math.importance import importance_ratio, importance_weight
from rlflow.ops.math.kl import absolute, k1, k2, k3, token_kl
from rlflow.ops.math.losses import clipped, log_ratio, nll, ppo_clip, value_loss
from rlflow.ops.math.masked import masked_mean, masked_sum, masked_var, masked_whiten, select
from rlflow.ops.math.objective import combine, policy_objective, sft_objective, value_objective

__all__ = [
    "Totals",
    "absolute",
    "aggregate",
    "clipped",
    "combine",
    "count",
    "gae",
    "grpo",
    "importance_ratio",
    "importance_weight",
    "k1",
    "k2",
    "k3",
    "log_ratio",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "nll",
    "policy_objective",
    "ppo_clip",
    "reinforce_pp",
    "rloo",
    "select",
    "sft_objective",
    "token_kl",
    "token_mean",
    "token_rewards",
    "value_loss",
    "value_objective",
]
