"""The reference as the baseline: what a sample earns beyond a response of the frozen model.

ReMax (Li et al. 2023, arXiv 2310.10505) with a baseline that stays.
`rlflow run pipelines/reference_baseline.py`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 100
    prompts_per_iteration: int = 64
    group_size: int = 4
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


both = {"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=both),
        "h100": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
    }
)
def reference_baseline(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)

    greedy = ops.rollout(ref, prompts, n=1, max_new_tokens=12, temperature=0.0)
    earned = ops.reward(exact_match, greedy, name="earned").rename(baseline="reward")
    baseline = ops.join(samples, (greedy, earned), by="row_id", several="first")
    adv = ops.advantage("remax", samples, reward, baseline)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("reinforce"))
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
