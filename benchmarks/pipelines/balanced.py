"""GRPO with a frozen scorer for the reward and a reference for the KL: two pools of one core.

Where the frozen models run decides what can be hidden. With the rollouts, both pools have about
as much to do, and staleness lets them do it side by side, or streaming, where an iteration makes
several optimizer steps. With the training, they wait for rollouts that streaming brings piece by
piece.
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops

APART = {"train": 1, "gen": 1}
WITH_ROLLOUTS = {"*": rf.on("gen"), "actor.train": rf.on("train")}
WITH_TRAINING = {"*": rf.on("train"), "actor.rollout": rf.on("gen")}


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 64
    group_size: int = 8
    new_tokens: int = 12
    ignore_eos: bool = True
    kl_coef: float = 0.02
    lr: float = 1e-6
    lora: int = 0
    mini_batches: int = 1
    model: str = "pipelines/assets/arith-tiny"


def score(response: str, answer: str, values: list[float]) -> float:
    return float(response.startswith(answer)) + values[-1]


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(pools=APART, assign=WITH_ROLLOUTS),
        "stale": rf.Placement(pools=APART, assign=WITH_ROLLOUTS, staleness=1),
        "chain": rf.Placement(pools=APART, assign=WITH_TRAINING),
        "chunks": rf.Placement(pools=APART, assign=WITH_TRAINING, stream="auto"),
        "steps": rf.Placement(pools=APART, assign=WITH_ROLLOUTS),
        "stream": rf.Placement(pools=APART, assign=WITH_ROLLOUTS, stream="auto"),
    }
)
def balanced(cfg: Config) -> None:
    lora = rf.LoRA(rank=cfg.lora) if cfg.lora else None
    adam = rf.AdamW(lr=cfg.lr)
    actor = rf.Model("actor", cfg.model, optimizer=adam, lora=lora, init="random")
    ref = rf.Model("ref", cfg.model, init="random")
    scorer = rf.Model("scorer", cfg.model, head="value", init="random")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(
        actor,
        prompts,
        n=cfg.group_size,
        max_new_tokens=cfg.new_tokens,
        ignore_eos=cfg.ignore_eos,
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
        mini_batches=cfg.mini_batches,
        shuffle=cfg.mini_batches == 1,
        loss=rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef, old="rollout"),
    )
