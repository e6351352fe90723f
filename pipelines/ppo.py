"""PPO: a critic, GAE over tokens, several clipped steps, the KL to a reference in the reward.

Schulman et al. 2017, arXiv 1707.06347; Ouyang et al. 2022, arXiv 2203.02155.
`rlflow run pipelines/ppo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 300
    prompts_per_iteration: int = 128
    mini_batches: int = 4
    kl_coef: float = 0.01
    lr: float = 1e-4
    critic_lr: float = 5e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(policy: int, others: int) -> rf.Placement:
    """The policy on some devices; critic and reference on others."""
    assign = {"*": rf.on("others"), "actor": rf.on("policy")}
    return rf.Placement(pools={"policy": policy, "others": others}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
        "h100_split": placed(4, 4),
    }
)
def ppo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    critic = rf.Model("critic", cfg.model, head="value", optimizer=rf.AdamW(lr=cfg.critic_lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    values = ops.values(critic, samples)
    adv = ops.advantage("gae", samples, reward, values, ref_lp, lam=0.95, kl_coef=cfg.kl_coef)
    parts = cfg.mini_batches
    ops.update(critic, samples, values, adv, loss=rf.ValueLoss(), mini_batches=parts)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"), mini_batches=parts)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
