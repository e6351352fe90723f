"""Demonstrations among the samples: rows of a data set join every update of GRPO.

Yan et al. 2025 (LUFFY), arXiv 2504.14945. `rlflow run pipelines/mixed_demonstrations.py`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 100
    prompts_per_iteration: int = 32
    demonstrations: int = 16
    group_size: int = 8
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


both = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=both),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
    }
)
def mixed_demonstrations(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    data = rf.data.arithmetic(digits=2)
    prompts = ops.prompts(data, batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    adv = ops.advantage("grpo", samples, reward)

    shown = ops.prompts(data, batch=cfg.demonstrations, name="shown")
    written = ops.tokenize(actor, shown)
    batch = ops.concat((samples, adv), written, fill={"advantages": 1.0})
    ops.update(actor, batch, loss=rf.PolicyLoss("ppo_clip"))
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
