"""GRPO on two-digit addition: the whole algorithm, and placements to compare.

rlflow run pipelines/grpo_arithmetic.py --placement split
rlflow run pipelines/grpo_arithmetic.py --placement async
rlflow run pipelines/grpo_arithmetic.py --placement fsdp --devices cpu:2
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 400
    prompts_per_iteration: int = 64
    group_size: int = 8
    kl_coef: float = 0.0
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")},
        ),
        "async": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")},
            staleness=1,
        ),
        "sglang": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={"*": rf.on("train"), "actor.rollout": rf.on("gen", engine="sglang")},
        ),
        "fsdp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")}),
        "fsdp_tp": rf.Placement(pools={"all": 4}, assign={"*": rf.on("all", tp=2)}),
    }
)
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
