"""GRPO on addition for a model of 0.5 billion parameters: what `half_billion.py` times.

Responses have their full length, so that what is planned is what is computed.
"""

from __future__ import annotations

from typing import Literal

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 4
    group_size: int = 4
    new_tokens: int = 16
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    model: str = "pipelines/assets/arith-tiny"


def score(response: str, answer: str) -> float:
    return float(len(response) % 7)


@rf.pipeline()
def half_billion(cfg: Config) -> None:
    adam = rf.AdamW(lr=1e-6)
    actor = rf.Model("actor", cfg.model, dtype=cfg.dtype, optimizer=adam, init="random")
    ref = rf.Model("ref", cfg.model, dtype=cfg.dtype, init="random")
    prompts = ops.prompts(rf.data.arithmetic(digits=8), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(
        actor, prompts, n=cfg.group_size, max_new_tokens=cfg.new_tokens, ignore_eos=True
    )
    reward = ops.reward(score, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.02))
