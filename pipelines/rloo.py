"""RLOO: REINFORCE with the mean reward of the prompt's other samples as baseline, KL in the reward.

Ahmadian et al. 2024, arXiv 2402.14740. `rlflow run pipelines/rloo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    kl_coef: float = 0.01
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(train: int, gen: int) -> rf.Placement:
    """Training on some devices; rollouts and the reference on others."""
    assign = {"*": rf.on("gen"), "actor.train": rf.on("train")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
        "h100_split": placed(4, 4),
    }
)
def rloo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("rloo", samples, reward, ref_lp, kl_coef=cfg.kl_coef)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("reinforce"))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
