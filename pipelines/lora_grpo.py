"""GRPO with low-rank adapters; the reference is the same model with its adapters switched off.

Hu et al. 2021, arXiv 2106.09685. `rlflow plan pipelines/lora_grpo.py` says what serves it.
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    group_size: int = 8
    rank: int = 16
    kl_coef: float = 0.01
    lr: float = 1e-3
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def placed(train: int, gen: int, engine: str = "torch") -> rf.Placement:
    """Training, and so the reference, on some devices; rollouts on others."""
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen", engine=engine)}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": placed(1, 1),
        "sglang": placed(1, 1, engine="sglang"),
        "h100": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")}),
        "h100_split": placed(4, 4),
    }
)
def lora_grpo(cfg: Config) -> None:
    everywhere = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapters = rf.LoRA(rank=cfg.rank, alpha=2 * cfg.rank, targets=everywhere)
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr), lora=adapters)
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
