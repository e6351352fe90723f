"""ReMax: REINFORCE, the reward of the greedy response to the same prompt as baseline.

Li et al. 2023, arXiv 2310.10505. `rlflow run pipelines/remax.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 128
    samples_per_prompt: int = 1
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(train: int, gen: int) -> rf.Placement:
    """Training on some devices, rollouts on others."""
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "greedy": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
        "h100_split": placed(4, 4),
    }
)
def remax(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    greedy = ops.rollout(actor, prompts, temperature=0, max_new_tokens=12, name="greedy")
    score = ops.reward(exact_match, greedy, name="greedy_reward")
    baseline = score.rename(baseline="reward")
    n = cfg.samples_per_prompt
    samples = ops.rollout(actor, greedy, baseline, n=n, max_new_tokens=12, name="sampled")
    reward = ops.reward(exact_match, samples)
    adv = ops.advantage("remax", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("reinforce"))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
