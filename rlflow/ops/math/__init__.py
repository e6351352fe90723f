"""The bodies of the operators as pure functions of tensors, and nothing else.

The reference form is padded: token tensors `[rows, tokens]` with a bool mask, row tensors
`[rows]`, groups as int64 ids `[rows]`. What stands at a masked position, NaN included,
changes no value and no gradient. Importing this package imports torch; nothing here knows
models, devices, graphs or files.
"""

from __future__ import annotations

from rlflow.ops.math.advantages import (
    degenerate,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    opo,
    optimal_token_baseline,
    overlong_penalty,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    token_rewards,
)
from rlflow.ops.math.aggregate import Totals, aggregate, count, token_mean
from rlflow.ops.math.batchwise import batchwise_objective
from rlflow.ops.math.controllers import adaptive_entropy, adaptive_kl, gated_entropy
from rlflow.ops.math.covariance import clip_cov, clip_cov_chosen, kl_cov, kl_cov_chosen
from rlflow.ops.math.diagnostics import finished, rollout_measures
from rlflow.ops.math.distillation import (
    distill_objective,
    generalized_jsd,
    teacher_advantages,
    teacher_kl,
    top_k_forward_kl,
)
from rlflow.ops.math.importance import (
    importance_ratio,
    importance_weight,
    normalized,
    weight_sums,
)
from rlflow.ops.math.kl import absolute, full_kl, full_kl_of_logits, k1, k2, k3, token_kl
from rlflow.ops.math.losses import clipped, log_ratio, nll, ppo_clip, value_loss
from rlflow.ops.math.masked import masked_mean, masked_sum, masked_var, masked_whiten, select
from rlflow.ops.math.objective import combine, policy_objective, sft_objective, value_objective
from rlflow.ops.math.off_policy import near_policy, top_entropy
from rlflow.ops.math.pairs import best_against_worst, pair_rows, penalise_unfinished
from rlflow.ops.math.preference import (
    divergence_score,
    pairwise_reward_loss,
    pointwise_reward_loss,
    preference_loss,
    sequence_log_probs,
)
from rlflow.ops.math.proximal import loglinear
from rlflow.ops.math.rejection import divergence, kept
from rlflow.ops.math.sequence_losses import gmpo, gspo, sequence_clip, vespo
from rlflow.ops.math.token_losses import cispo, dppo_kl, dppo_tv, dro, reinforce, sapo

__all__ = [
    "Totals",
    "absolute",
    "adaptive_entropy",
    "adaptive_kl",
    "aggregate",
    "batchwise_objective",
    "best_against_worst",
    "cispo",
    "clip_cov",
    "clip_cov_chosen",
    "clipped",
    "combine",
    "count",
    "degenerate",
    "distill_objective",
    "divergence",
    "divergence_score",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "finished",
    "full_kl",
    "full_kl_of_logits",
    "gae",
    "gated_entropy",
    "gdpo",
    "generalized_jsd",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "importance_ratio",
    "importance_weight",
    "k1",
    "k2",
    "k3",
    "kept",
    "kl_cov",
    "kl_cov_chosen",
    "log_ratio",
    "loglinear",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "near_policy",
    "nll",
    "normalized",
    "opo",
    "optimal_token_baseline",
    "overlong_penalty",
    "pair_rows",
    "pairwise_reward_loss",
    "pass_at_k",
    "penalise_unfinished",
    "pointwise_reward_loss",
    "policy_objective",
    "ppo_clip",
    "preference_loss",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "rollout_measures",
    "sapo",
    "select",
    "sequence_clip",
    "sequence_log_probs",
    "sft_objective",
    "teacher_advantages",
    "teacher_kl",
    "token_kl",
    "token_mean",
    "token_rewards",
    "top_entropy",
    "top_k_forward_kl",
    "value_loss",
    "value_objective",
    "vespo",
    "weight_sums",
]
