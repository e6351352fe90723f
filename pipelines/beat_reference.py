"""Ops that use a model: a reward for beating the reference's own answer, in its own words.

Ahmadian et al. 2024, arXiv 2402.14740. `rlflow run pipelines/beat_reference.py --placement split`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    prompts_per_iteration: int = 32
    group_size: int = 8
    plain_coef: float = 0.1
    lr: float = 2e-4
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 25


@rf.op(per="row")
def rival(ref: rf.Sampler, prompt: list[str], *, max_new_tokens: int) -> list[str]:
    return ref.generate(prompt)


@rf.op(per="row")
def plain(
    ref: rf.Scorer, prompt_tokens: rf.Token[int], response_tokens: rf.Token[int]
) -> rf.Row[float]:
    return ref.log_probs(prompt_tokens, response_tokens).to_padded_tensor(0.0).sum(-1)


def beats(response: str, rival: str, answer: str, plain: float, *, coef: float) -> float:
    return float(response == answer) - float(rival == answer) + coef * plain


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


split = {"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")}
colocate = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
apart = rf.Placement(pools={"train": 1, "gen": 1}, assign=split)


@rf.pipeline(placements={"colocate": colocate, "split": apart})
def beat_reference(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=12)
    other, words = rival(ref, samples, max_new_tokens=12), plain(ref, samples)
    reward = ops.reward(beats, samples, other, words, coef=cfg.plain_coef)
    adv = ops.advantage("rloo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
