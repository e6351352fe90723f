"""A curriculum: problems are drawn by how often they are solved, as measured while it learns.

The weight of a level with pass rate p is p (1 - p): Foster and Foerster 2025, arXiv 2502.12272.
`rlflow run pipelines/curriculum.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 300
    prompts_per_iteration: int = 32
    group_size: int = 8
    floor: float = 0.1
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def split(train: int, gen: int, staleness: int = 0) -> rf.Placement:
    """Training on some devices, rollouts on others."""
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign, staleness=staleness)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": split(1, 1),
        "async": split(1, 1, staleness=1),
        "h100": split(4, 4, staleness=1),
    }
)
def curriculum(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    few = rf.data.arithmetic(digits=1, test_size=20)
    levels = {"1": few} | {str(n): rf.data.arithmetic(digits=n) for n in (2, 3)}
    passes = rf.PassRates("passes", by="level", weight="learnability", floor=cfg.floor)
    prompts = ops.prompts(
        rf.data.mix(levels, column="level"), batch=cfg.prompts_per_iteration, weights=passes
    )
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ops.track(passes, samples, reward)
    adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss(correction=rf.ImportanceSampling(cap=5.0))
    ops.update(actor, samples, adv, loss=loss)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
