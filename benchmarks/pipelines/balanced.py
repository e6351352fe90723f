"""GRPO with adapters, whose rollouts take about as long as its updates: one core each.

A frozen scorer gives the reward and a reference the KL; both run where training runs, so
they are what streaming can hide behind the rollouts, and staleness everything.
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops

ASSIGN = {"*": rf.on("train"), "actor.rollout": rf.on("gen")}
APART = {"train": 1, "gen": 1}


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 8
    group_size: int = 8
    new_tokens: int = 110
    mini_batches: int = 1
    kl_coef: float = 0.02
    lr: float = 1e-6
    model: str = "pipelines/assets/arith-tiny"


def score(response: str, answer: str, values: list[float]) -> float:
    return float(response.startswith(answer)) + values[-1]


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools=APART, assign=ASSIGN),
        "stale": rf.Placement(pools=APART, assign=ASSIGN, staleness=1),
        "stream": rf.Placement(pools=APART, assign=ASSIGN, stream="auto"),
    }
)
def balanced(cfg: Config) -> None:
    lora = rf.LoRA(rank=8)
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr), lora=lora)
    ref = rf.Model("ref", cfg.model)
    scorer = rf.Model("scorer", cfg.model, head="value")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(
        actor, prompts, n=cfg.group_size, max_new_tokens=cfg.new_tokens, ignore_eos=True
    )
    scores = ops.values(scorer, samples)
    reward = ops.reward(score, samples, scores)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(
        actor,
        samples,
        adv,
        ref_lp,
        loss=rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef, old="rollout"),
        mini_batches=cfg.mini_batches,
    )
