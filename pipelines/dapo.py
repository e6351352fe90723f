"""DAPO: clip-higher, token-mean, overlong shaping, prompts drawn until enough are informative.

Yu et al. 2025, arXiv 2503.14476. `rlflow run pipelines/dapo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    groups: int = 32
    prompts_per_trip: int = 32
    group_size: int = 8
    at_most: int = 4
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def shaped(reward: float, response_tokens: list[int]) -> float:
    """The reward, less up to 1 over the last 4 of 12 tokens (eq. 13)."""
    return reward - max(0, len(response_tokens) - 8) / 4


all_on, apart = {"*": rf.on("all")}, {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign=all_on),
        "split": rf.Placement(pools={"train": 1, "gen": 1}, assign=apart),
        "h100": rf.Placement(pools={"all": 8}, assign=all_on),
    }
)
def dapo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))

    def attempt() -> tuple[rf.Handle, ...]:
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_trip)
        samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
        reward = ops.reward(exact_match, samples)
        return samples, reward, ops.informative(samples, reward)

    groups, most = cfg.groups, cfg.at_most
    batch = ops.repeat(attempt, until="informative", groups=groups, at_most=most, expected=2)
    reward = ops.reward(shaped, batch, name="shaped")
    adv = ops.advantage("grpo", batch.only("group"), reward)
    ops.update(actor, batch, adv, loss=rf.PolicyLoss("ppo_clip", clip=(0.2, 0.28)))
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact_match, every=cfg.eval_every, max_new_tokens=12)
