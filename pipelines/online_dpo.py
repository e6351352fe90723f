"""Online DPO: of a prompt's samples the best is preferred to the worst, by the policy's own odds.

Guo et al. 2024, arXiv 2402.04792. `rlflow run pipelines/online_dpo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 4
    kind: str = "sigmoid"
    beta: float = 0.1
    lr: float = 1e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def closeness(response: str, answer: str) -> float:
    """0 for the answer, down to -1 the further off a number is; -1 for what is none."""
    wrong = not response.isdecimal() or not response.isascii()
    return -1.0 if wrong else -min(abs(int(response) - int(answer)), 100) / 100


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={"*": rf.on("gen"), "actor.train": rf.on("train")},
        ),
        "h100": rf.Placement(
            pools={"all": 8},
            assign={"*": rf.on("all"), "actor.rollout": rf.on("all", tp=2)},
        ),
    }
)
def online_dpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(closeness, samples)
    pairs = ops.pair(samples, reward, missing_eos_penalty=1.0)
    ref_lp = ops.log_probs(ref, samples)
    ops.update(actor, samples, pairs, ref_lp, loss=rf.DPOLoss(cfg.kind, beta=cfg.beta))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
