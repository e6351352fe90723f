"""REINFORCE++: no critic and no groups, advantages normalised over the whole batch.

Hu et al. 2025, arXiv 2501.03262. `rlflow run pipelines/reinforce_pp.py`; with several samples of
a prompt its variant with a baseline: `--set group_size=8 --set prompts_per_iteration=32`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 256
    group_size: int = 1
    kl_coef: float = 0.01
    lr: float = 1e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


everything = {"*": rf.on("all")}
apart = {"*": rf.on("gen"), "actor.train": rf.on("train")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign=everything),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=apart),
        "h100": rf.Placement(pools={"all": 8}, assign=everything),
        "h100_split": rf.Placement(pools={"train": 4, "gen": 4}, assign=apart),
    }
)
def reinforce_pp(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    if cfg.group_size > 1:
        adv = ops.advantage("reinforce++-baseline", samples, reward)
        loss = rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef, kl="k2")
    else:
        adv = ops.advantage("reinforce++", samples, reward, ref_lp, kl_coef=cfg.kl_coef)
        loss = rf.PolicyLoss("ppo_clip")
    ops.update(actor, samples, adv, ref_lp, loss=loss, mini_batches=2)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
