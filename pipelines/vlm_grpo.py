"""GRPO on pictures: a model that sees learns to name the colour of what is drawn.

rlflow run pipelines/vlm_grpo.py
rlflow run pipelines/vlm_grpo.py --placement fsdp --devices cpu:2
rlflow run pipelines/vlm_grpo.py --set train_vision=false
"""

from __future__ import annotations

from typing import Literal

import rlflow as rf
from rlflow import ops

Question = Literal["colour", "shape", "count"]


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 120
    prompts_per_iteration: int = 16
    group_size: int = 16
    question: Question = "colour"
    lr: float = 5e-4
    model: str = "pipelines/assets/shapes-tiny"
    eval_every: int = 20
    train_vision: bool = True


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")},
        ),
        "fsdp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")}),
    }
)
def vlm_grpo(cfg: Config) -> None:
    frozen = () if cfg.train_vision else "vision"
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr), freeze=frozen)
    prompts = ops.prompts(rf.data.shapes(cfg.question), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=8)
    reward = ops.reward(exact_match, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
    held_out = rf.data.shapes(cfg.question, size=256, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=8)
