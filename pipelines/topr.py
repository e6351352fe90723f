"""TOPR: a loss written here: samples to be unlearned count as far as they are still likely.

Le Roux et al. 2025, arXiv 2503.14286. `rlflow run pipelines/topr.py --placement split`
"""

from __future__ import annotations

from typing import TypedDict

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 32
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


class Terms(TypedDict):
    """The loss of each response, and a metric."""

    loss: rf.Row[float]
    negative_weight: rf.Row[float]


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.loss(corrects=True)
def topr(
    log_probs: rf.Token[float],
    rollout_log_probs: rf.Token[float],
    advantages: rf.Row[float],
    *,
    weight_max: float = 1.0,
) -> Terms:
    ratio = (log_probs - rollout_log_probs).sum(-1).detach().exp()
    weight = ratio.clamp(max=weight_max).where(advantages < 0, 1.0)
    return {"loss": -weight * advantages * log_probs.sum(-1), "negative_weight": weight}


colocate = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
split = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
ahead = rf.Placement(pools={"train": 1, "gen": 1}, assign=split, staleness=1)


@rf.pipeline(placements={"colocate": colocate, "split": ahead})
def tapered(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=8, max_new_tokens=12)
    adv = ops.advantage("dr_grpo", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, adv, loss=topr)
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
