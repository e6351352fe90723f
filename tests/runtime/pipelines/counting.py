"""A loop whose state goes round until every row is done."""

from typing import TypedDict

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    at_most: int = 4
    most: int = 3


@rf.op(per="row")
def begun(sample: rf.Row[int]) -> rf.Row[float]:
    return 0.0 * sample


@rf.op(per="row")
def target(sample: rf.Row[int], *, most: int) -> rf.Row[float]:
    return 1.0 + (sample % 4) % most


@rf.op(per="row")
def grown(count: rf.Row[float], target: rf.Row[float]) -> rf.Row[float]:
    return count + (count < target)


@rf.op(per="row")
def done(count: rf.Row[float], target: rf.Row[float]) -> rf.Row[bool]:
    return count >= target


class Seen(TypedDict):
    total: rf.Row[float]
    most: rf.Row[float]
    short: rf.Row[float]
    left: rf.Row[float]


@rf.op(per="batch")
def seen(count: rf.Row[float], target: rf.Row[float], done: rf.Row[bool]) -> Seen:
    short = target - count
    like = count.new_ones(len(count))
    return {
        "total": count.sum() * like,
        "most": count.max() * like,
        "short": short.sum() * like,
        "left": (~done).sum() * like,
    }


PLACEMENTS = {"together": together(), "apart": apart("grown")}


@rf.pipeline(placements=PLACEMENTS)
def counting(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=4)
    aim = target(samples, most=cfg.most)

    def step(state):
        after = grown(state, aim).rename(count="grown")
        return after, done(after, aim)

    ended = ops.repeat(
        step, begun(samples).rename(count="begun"), until="done", at_most=cfg.at_most, name="count"
    )
    ops.metrics(seen(ended.only("count", "done"), aim, name="look"), name="seen")
    reward = ended.only("count").rename(reward="count")
    ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())
