"""GRPO with a drafter that learns in the background: the same samples, in fewer passes.

Hu et al. 2025 (TLT), arXiv 2511.16665; here drafts share the policy's random numbers.
`rlflow simulate pipelines/drafted_grpo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    draft_tokens: int = 3
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    drafter: str = "pipelines/assets/arith-tiny"
    untrained: bool = True
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(train: int, gen: int) -> rf.Placement:
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "h100": placed(4, 4),
    }
)
def drafted_grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    drafter = rf.Model(
        "drafter",
        cfg.drafter,
        init="random" if cfg.untrained else "pretrained",
        optimizer=rf.AdamW(lr=1e-3),
    )
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    many, drafts = cfg.group_size, cfg.draft_tokens
    samples = ops.rollout(
        actor, prompts, n=many, max_new_tokens=12, drafter=drafter, draft_tokens=drafts
    )
    adv = ops.advantage("grpo", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
    ops.train_drafter(drafter, samples, steps=4)
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
