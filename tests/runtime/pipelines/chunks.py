"""Rows that are generated, judged, spread by a user's rule, compared in groups and summed up."""

import zlib

import torch

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart


class Config(rf.Config):
    batch: int = 16
    n: int = 2
    length: int = 6
    temperature: float = 1.0
    equal: bool = True
    ordered: bool = False


def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)


def in_turn(tokens, groups, parts):
    return [[r for r in range(len(tokens)) if (r + 1) % parts == part] for part in range(parts)]


rf.register_dispatch("in_turn", in_turn)


@rf.op(per="row", dispatch="in_turn")
def bonus(reward: rf.Row[float], group: rf.Row[int], sample: rf.Row[int]) -> rf.Row[float]:
    return reward + (group % 5) * 0.25 + (sample % 3) * 0.125


@rf.op(per="group")
def centred(bonus: rf.Row[float], group: rf.Row[int]) -> rf.Row[float]:
    return bonus - bonus.mean()


@rf.op(per="batch")
def digest(
    response: rf.Row[str], centred: rf.Row[float], group: rf.Row[int], sample: rf.Row[int]
) -> rf.Row[float]:

    from rlflow.batch import strings

    said = "|".join(strings(response)) + str([c.tolist() for c in (centred, group, sample)])
    return torch.full((len(response),), float(zlib.crc32(said.encode()) % 2**20))


def look(**options: object) -> rf.Placement:
    """The rollout and the reference on devices of their own."""
    gen = {"actor.rollout": rf.on("gen"), "bonus": rf.on("gen")}
    assign = {"actor": rf.on("train"), "ref": rf.on("look"), **gen}
    return rf.Placement(pools={"train": 1, "gen": 1, "look": 1}, assign=assign, **options)


def fsdp(**options: object) -> rf.Placement:
    """Two devices that share everything out, and one for what is compared in groups."""
    whole = {"actor.rollout": rf.on("all"), "bonus": rf.on("all"), "centred": rf.on("cpus")}
    assign = {"*": rf.on("all", fsdp=2), **whole}
    return rf.Placement(pools={"all": 2, "cpus": 1}, assign=assign, **options)


@rf.pipeline(
    placements={
        "split": apart("bonus"),
        "look": look(),
        "fsdp": fsdp(),
        "ranks": apart("bonus", gen=2),
    }
)
def chunks(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", TINY)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.batch)
    samples = ops.rollout(
        actor,
        prompts,
        n=cfg.n,
        max_new_tokens=cfg.length,
        ignore_eos=cfg.equal,
        temperature=cfg.temperature,
    )
    rewarded = bonus(ops.reward(judge, samples), samples)
    ref_lp, old_lp = ops.log_probs(ref, samples), ops.log_probs(actor, samples)
    adv = ops.advantage("grpo", samples, rewarded.rename(reward="bonus"))
    loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
    steps = {"mini_batches": 4, "shuffle": False} if cfg.ordered else {"epochs": 2}
    ops.update(actor, samples, adv, ref_lp, old_lp, loss=loss, **{"mini_batches": 2, **steps})
    ops.metrics(digest(samples, centred(rewarded, samples)))
