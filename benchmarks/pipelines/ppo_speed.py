"""PPO with all four models that TRL's PPOTrainer has: what `vs_trl_ppo.py` times.

TRL scores with a reward model, so a frozen value model of the same size scores here too: its
value at the last token is the reward, and whether the response starts with the answer is
added, which costs nothing and gives the policy something to learn.
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 128
    new_tokens: int = 12
    epochs: int = 4
    kl_coef: float = 0.05
    lr: float = 1e-6
    model: str = "pipelines/assets/arith-tiny"


def score(response: str, answer: str, values: list[float]) -> float:
    return float(response.startswith(answer)) + values[-1]


@rf.pipeline()
def ppo_speed(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    critic = rf.Model("critic", cfg.model, head="value", optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    scorer = rf.Model("scorer", cfg.model, head="value", init="random")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, max_new_tokens=cfg.new_tokens, ignore_eos=True)
    scores = ops.values(scorer, samples)
    reward = ops.reward(score, samples, scores)
    ref_lp = ops.log_probs(ref, samples)
    values = ops.values(critic, samples)
    adv = ops.advantage("gae", samples, reward, values, ref_lp, kl_coef=cfg.kl_coef)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"), epochs=cfg.epochs)
    ops.update(critic, samples, values, adv, loss=rf.ValueLoss(), epochs=cfg.epochs)
