"""A loop after a loop: rows are drawn until enough groups count, then those go round again."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, together


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5 == 0)


@rf.op(per="row")
def grown(count: rf.Row[float]) -> rf.Row[float]:
    return count + 1


@rf.op(per="row")
def done(count: rf.Row[float]) -> rf.Row[bool]:
    return count > 2


@rf.pipeline(placements={"one": together()})
def twice(cfg: rf.Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))

    def attempt():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=4, max_new_tokens=4)
        reward = ops.reward(letters, samples)
        return samples, reward, ops.informative(samples, reward)

    drawn = ops.repeat(
        attempt, until="informative", groups=4, at_most=4, exhausted="fill", name="draw"
    )

    def step(state):
        after = grown(state).rename(count="grown")
        return after, done(after)

    first = drawn.only("reward").rename(count="reward")
    counted = ops.repeat(step, first, until="done", at_most=4, name="count")
    ops.metrics(counted.only("count"), name="counted")
    reward = counted.only("count").rename(reward="count")
    adv = ops.advantage("grpo", drawn.only("group"), reward)
    ops.update(actor, drawn, adv, loss=rf.PolicyLoss())
