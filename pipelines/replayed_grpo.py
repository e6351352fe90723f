"""GRPO with a replay buffer: each update learns from new groups and from some that are older.

Zhang et al. 2025 (RLEP), arXiv 2507.07451, in its idea. `rlflow run pipelines/replayed_grpo.py`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 100
    prompts_per_iteration: int = 24
    replayed: int = 8
    keep: int = 3
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
def replayed_grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    adv = ops.advantage("grpo", samples, reward)

    older = ops.replay(samples, adv, keep=cfg.keep, sample=cfg.replayed, fresh=False)
    batch = ops.concat((samples, adv), older)
    proximal = ops.log_probs(actor, batch)
    loss = rf.PolicyLoss("ppo_clip", old="recomputed", correction=rf.ImportanceSampling(cap=5.0))
    ops.update(actor, batch, proximal, loss=loss)
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
