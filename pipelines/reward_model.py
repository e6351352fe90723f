"""A reward model beside a rule: RLOO on both, and the model learns from pairs as they come.

Ouyang et al. 2022, arXiv 2203.02155. `rlflow run pipelines/reward_model.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    lr: float = 2e-4
    judge_lr: float = 1e-3
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def liked(response: str, answer: str) -> float:
    """What a reader would prefer: a number that is less far off."""
    wrong = not response.isdecimal() or not response.isascii()
    return -100.0 if wrong else -float(min(abs(int(response) - int(answer)), 100))


def both(reward: float, score: float) -> float:
    """The rule, and up to 0.2 more or less by what the model says."""
    return reward + max(-0.2, min(0.2, 0.05 * score))


apart = {"*": rf.on("judge"), "actor": rf.on("policy")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools={"policy": 1, "judge": 1}, assign=apart),
        "h100": rf.Placement(pools={"policy": 4, "judge": 4}, assign=apart),
    }
)
def reward_model(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    judge = rf.Model("judge", cfg.model, head="value", optimizer=rf.AdamW(lr=cfg.judge_lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    rule = ops.reward(exact_match, samples, name="rule")
    pairs = ops.pair(samples, ops.reward(liked, samples, name="liked"))
    reward = ops.reward(both, rule, ops.scores(judge, samples), name="both")
    ops.update(actor, samples, ops.advantage("rloo", samples, reward), loss=rf.PolicyLoss())
    ops.update(judge, samples, pairs, loss=rf.RewardModelLoss("pairwise"))
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
