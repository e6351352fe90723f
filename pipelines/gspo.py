"""GSPO: one ratio for a whole response, the geometric mean of its tokens', clipped very narrowly.

Zheng et al. 2025, arXiv 2507.18071. `rlflow run pipelines/gspo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change; the clip range and four mini-batches are the paper's."""

    iterations: int = 200
    prompts_per_iteration: int = 64
    group_size: int = 8
    mini_batches: int = 4
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    lr: float = 1e-4
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
def gspo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss("gspo", clip=(cfg.clip_low, cfg.clip_high))
    ops.update(actor, samples, adv, loss=loss, mini_batches=cfg.mini_batches)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
