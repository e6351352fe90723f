"""GRPO on addition with nothing but the training iteration: what `vs_trl.py` times.

Like pipelines/grpo_arithmetic.py without the evaluation. With `fixed` a model that cannot
stop is expected, and a response is right if it starts with the answer.
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 16
    group_size: int = 8
    new_tokens: int = 12
    kl_coef: float = 0.0
    lr: float = 1e-6
    model: str = "pipelines/assets/arith-tiny"
    fixed: bool = False
    dtype: str = "float32"


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def starts_right(response: str, answer: str) -> float:
    return float(response.startswith(answer))


@rf.pipeline()
def grpo_speed(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, dtype=cfg.dtype, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model, dtype=cfg.dtype)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(
        actor, prompts, n=cfg.group_size, max_new_tokens=cfg.new_tokens, ignore_eos=cfg.fixed
    )
    reward = ops.reward(starts_right if cfg.fixed else exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef))
