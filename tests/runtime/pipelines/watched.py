"""A policy on held-out sums, watched by an evaluation or not, in a pool of its own or not."""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow import ops

TINY = str(Path(__file__).parents[3] / "pipelines" / "assets" / "arith-tiny")
ASSIGN = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}


class Config(rf.Config):
    """What `--set` may change: 0 is no evaluation."""

    every: int = 2
    sampled: float = 0.0


def right(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(
    placements={
        "together": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "apart": rf.Placement(
            pools={"train": 1, "gen": 1, "look": 1}, assign={**ASSIGN, "eval": rf.on("look")}
        ),
        "ahead": rf.Placement(
            pools={"train": 1, "gen": 1, "look": 1},
            assign={**ASSIGN, "eval": rf.on("look")},
            staleness=1,
        ),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=ASSIGN),
        "behind": rf.Placement(pools={"train": 1, "gen": 1}, assign=ASSIGN, staleness=1),
    }
)
def watched(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
    adv = ops.advantage("grpo", samples, ops.reward(right, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
    if cfg.every:
        held_out = rf.data.arithmetic(digits=2, split="test")
        options = {"limit": 8, "max_new_tokens": 8, "temperature": cfg.sampled}
        ops.evaluate(actor, held_out, right, every=cfg.every, **options)
