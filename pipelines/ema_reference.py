"""GRPO whose reference follows: an exponential moving average of the weights that are trained.

Tarvainen and Valpola 2017, arXiv 1703.01780. `rlflow run pipelines/ema_reference.py`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    kl_coef: float = 0.05
    decay: float = 0.95
    every: int = 1
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


ALL, TRAIN, GEN = rf.on("all"), rf.on("train"), rf.on("gen")
APART = {"*": GEN, "actor.train": TRAIN}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": ALL}),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=APART),
        "fsdp": rf.Placement(pools={"all": 2}, assign={"*": ALL}),
        "h100_split": rf.Placement(pools={"train": 4, "gen": 4}, assign=APART),
    }
)
def ema_reference(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model, optimizer=rf.Average(decay=cfg.decay))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef))
    ops.average(ref, actor, every=cfg.every)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
