"""GRPO that keeps samples: an op that makes text, and one that writes it to a file in order.

Shao et al. 2024, arXiv 2402.03300. `rlflow run pipelines/kept_samples.py --placement split`
"""

from __future__ import annotations

import json
from pathlib import Path

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 32
    group_size: int = 8
    keep_every: int = 10
    keep_in: str = "kept_samples"
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"


def exact_match(verdict: str) -> float:
    return float(verdict == "right")


@rf.op(per="row")
def verdict(response: list[str], answer: list[str]) -> list[str]:
    pairs = zip(response, answer, strict=True)
    gaps = [abs(int(given) - int(right)) if given.isdigit() else 10 for given, right in pairs]
    return ["right" if gap == 0 else "near" if gap < 10 else "wrong" for gap in gaps]


@rf.op(per="batch")
def keep(
    prompt: list[str], response: list[str], verdict: list[str], *, into: str, iteration: int
) -> None:
    Path(into).mkdir(exist_ok=True)
    rows = [json.dumps(row) for row in zip(prompt, response, verdict, strict=True)]
    Path(into, f"{iteration:06}.jsonl").write_text("\n".join(rows) + "\n")


split = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
colocate = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
beside = rf.Placement(pools={"train": 1, "gen": 1}, assign=split)


@rf.pipeline(placements={"colocate": colocate, "split": beside})
def kept_samples(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    judged = verdict(samples)
    keep(samples, judged, into=cfg.keep_in, every=cfg.keep_every)
    adv = ops.advantage("grpo", samples, ops.reward(exact_match, judged))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
