"""Greedy rollouts whose tokens are summed up, over ranks that split rows, weights or both."""

import zlib

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY


class Config(rf.Config):
    rows: int = 12


def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)


@rf.op(per="batch")
def digest(response: rf.Row[str]) -> rf.Row[float]:
    import torch

    from rlflow.batch import strings

    number = zlib.crc32("|".join(strings(response)).encode())
    return torch.full((len(response),), float(number % 2**20))


def placement(devices, **layout):
    return rf.Placement(
        pools={"all": devices},
        assign={
            "*": rf.on("all", **layout),
            "actor.rollout": rf.on("all", tp=layout.get("tp", 1)),
        },
    )


@rf.pipeline(
    placements={
        "one": placement(1),
        "dp2": placement(2, fsdp=1),
        "fsdp2": placement(2, fsdp=2),
        "tp2": placement(2, fsdp=1, tp=2),
        "fsdp2tp2": placement(4, fsdp=2, tp=2),
        "hsdp": placement(4, fsdp=2),
        "hybrid": rf.Placement(
            pools={"train": [0, 1], "gen": [1, 2]},
            assign={"*": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")},
        ),
    }
)
def greedy(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=3e-4))
    ref = rf.Model("ref", TINY)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.rows)
    samples = ops.rollout(actor, prompts, n=1, max_new_tokens=6, temperature=0.0)
    reward = ops.reward(judge, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("reinforce++", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.1))
    ops.metrics(digest(samples))
