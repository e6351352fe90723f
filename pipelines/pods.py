"""PODS: many samples are drawn, and those whose rewards vary the most are learned from.

Xu et al. 2025, arXiv 2504.13818. `rlflow run pipelines/pods.py --placement split`
"""

from __future__ import annotations

from statistics import pvariance

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 100
    prompts_per_iteration: int = 16
    group_size: int = 16
    learned: int = 4
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@rf.op(per="group")
def varied(reward: rf.Row[float], *, of: int) -> rf.Row[bool]:
    """The lowest and the highest `of` rewards, so many of each that they vary the most."""
    rows = reward.argsort(stable=True).tolist()
    choices = [rows[:low] + rows[len(rows) - of + low :] for low in range(of + 1)]
    best = max(choices, key=lambda chosen: pvariance(reward[chosen].tolist()))
    return reward.new_zeros(len(rows)).bool().index_fill(0, reward.new_tensor(best).long(), 1)


both = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=both),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
    }
)
def pods(cfg: Config) -> None:
    actor, n = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr)), cfg.group_size
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=n, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    flags, most = varied(samples, reward, of=cfg.learned), cfg.prompts_per_iteration
    batch = ops.keep(
        samples, reward, flags, by="varied", per="row", at_least=most, expected=cfg.learned / n
    )
    ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss("ppo_clip"))
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
