"""Asynchronous GRPO: rollouts one update ahead, and a decoupled loss that corrects for it.

Fu et al. 2025 (AReaL), arXiv 2505.24298. `rlflow run pipelines/async_grpo.py --placement paused`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    mini_batches: int = 2
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(train: int, gen: int, pause_at: int | None = None) -> rf.Placement:
    """Training on some devices, rollouts on others, which may pause for newer weights."""
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign, pause_at=pause_at)


@rf.pipeline(
    staleness=1,
    placements={
        "split": placed(1, 1),
        "paused": placed(1, 1, pause_at=2),
        "h100": placed(4, 4),
        "h100_paused": placed(4, 4, pause_at=2),
    },
)
def async_grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    proximal = ops.log_probs(actor, samples)
    adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss("ppo_clip", old="recomputed", correction=rf.ImportanceSampling(cap=5.0))
    ops.update(actor, samples, adv, proximal, loss=loss, mini_batches=cfg.mini_batches)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
