"""DAPO: clip-higher, token-mean, no KL, and prompts drawn until enough groups are informative.

Yu et al. 2025, arXiv 2503.14476. `rlflow run pipelines/dapo.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 300
    groups: int = 32
    prompts_per_trip: int = 32
    group_size: int = 8
    at_most: int = 4
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen")},
        ),
    }
)
def dapo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))

    def attempt() -> tuple[rf.Handle, ...]:
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_trip)
        samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
        reward = ops.reward(exact_match, samples)
        return samples, reward, ops.informative(samples, reward)

    batch = ops.repeat(
        attempt, until="informative", groups=cfg.groups, at_most=cfg.at_most, expected=2
    )
    adv = ops.advantage("grpo", batch)
    ops.update(actor, batch, adv, loss=rf.PolicyLoss("ppo_clip", clip=(0.2, 0.28)))
