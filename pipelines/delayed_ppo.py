"""PPO with a delayed policy: the critic learns alone at first, then twice as often.

Fujimoto et al. 2018, arXiv 1802.09477. `rlflow run pipelines/delayed_ppo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 300
    prompts_per_iteration: int = 128
    warm_up: int = 10
    policy_every: int = 2
    kl_coef: float = 0.01
    lr: float = 1e-4
    critic_lr: float = 5e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


split = {"actor": rf.on("train"), "critic": rf.on("train"), "*": rf.on("gen")}
split["actor.rollout"] = rf.on("gen")


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=split),
    }
)
def delayed_ppo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    critic = rf.Model("critic", cfg.model, head="value", optimizer=rf.AdamW(lr=cfg.critic_lr))
    ref = rf.Model("ref", cfg.model)
    later, often = rf.Iterations(cfg.warm_up), cfg.policy_every
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, max_new_tokens=12)
    values = ops.values(critic, samples)
    adv = ops.advantage("gae", samples, ops.reward(exact_match, samples), values, lam=0.95)
    ops.update(critic, samples, values, adv, loss=rf.ValueLoss(), mini_batches=4)
    ref_lp = ops.log_probs(ref, samples, every=often, when=later)
    loss = rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef)
    ops.update(actor, samples, adv, ref_lp, loss=loss, mini_batches=4, every=often, when=later)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
