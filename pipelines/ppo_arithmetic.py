"""PPO on two-digit addition: a critic, GAE, and the KL to a reference in the reward.

rlflow run pipelines/ppo_arithmetic.py
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 300
    prompts_per_iteration: int = 128
    epochs: int = 2
    mini_batches: int = 2
    kl_coef: float = 0.01
    lr: float = 1e-4
    critic_lr: float = 5e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"policy": 1, "others": 1},
            assign={"actor": rf.on("policy"), "critic": rf.on("others"), "ref": rf.on("others")},
        ),
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
    epochs, parts = cfg.epochs, cfg.mini_batches
    values_loss, policy_loss = rf.ValueLoss(), rf.PolicyLoss("ppo_clip")
    ops.update(critic, samples, values, adv, loss=values_loss, epochs=epochs, mini_batches=parts)
    ops.update(actor, samples, adv, loss=policy_loss, epochs=epochs, mini_batches=parts)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
