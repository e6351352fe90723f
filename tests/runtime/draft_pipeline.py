"""Greedy rollouts with a drafter that learns from them, by an engine and by the embedded one."""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow import ops

TINY = Path(__file__).resolve().parents[2] / "pipelines" / "assets" / "arith-tiny"


class Config(rf.Config):
    prompts_per_iteration: int = 16
    iterations: int = 2
    draft_tokens: int = 2


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def colocated(engine: object) -> rf.Placement:
    own = rf.on("all", engine=engine, weights="own")
    return rf.Placement(pools={"all": 1}, assign={"*": rf.on("all"), "actor.rollout": own})


def split(engine: object, gen: int = 1, tp: int = 1) -> rf.Placement:
    rollout = rf.on("gen", engine=engine, tp=tp)
    assign = {"*": rf.on("train"), "actor.rollout": rollout}
    return rf.Placement(pools={"train": 1, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": colocated("sglang"),
        "split": split("sglang"),
        "ranks": split("sglang", gen=2, tp=2),
        "stream": split("sglang").model_copy(update={"stream": 2}),
        "embedded": split("torch"),
    }
)
def drafted(cfg: Config) -> None:
    actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=3e-4))
    drafter = rf.Model("drafter", str(TINY), init="random", optimizer=rf.AdamW(lr=2e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(
        actor,
        prompts,
        max_new_tokens=8,
        temperature=0.0,
        drafter=drafter,
        draft_tokens=cfg.draft_tokens,
    )
    advantage = ops.advantage("reinforce++", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
    ops.train_drafter(drafter, samples, steps=4)
