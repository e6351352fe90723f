"""Dr. GRPO: rewards less their group's mean, token sums divided by one constant for all.

Liu et al. 2025, arXiv 2503.20783. `rlflow run pipelines/dr_grpo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    max_new_tokens: int = 12
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(train: int, gen: int) -> rf.Placement:
    """Training on some devices, rollouts on others."""
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
        "h100_split": placed(4, 4),
    }
)
def dr_grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    longest = cfg.max_new_tokens
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=longest)
    reward = ops.reward(exact_match, samples)
    adv = ops.advantage("dr_grpo", samples, reward)
    loss = rf.PolicyLoss("ppo_clip", aggregate="seq-mean-token-sum-norm", constant=longest)
    ops.update(actor, samples, adv, loss=loss)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=longest)
