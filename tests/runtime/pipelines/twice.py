"""A loop that draws within one: [ [ prompts -> rollout -> informative ] -> best ] -> update."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together

PLACEMENTS = {"together": together(), "apart": apart()}


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 3 == 0)


@rf.op(per="group")
def best(reward: rf.Row[float]) -> rf.Row[bool]:
    return (reward.sum() >= 1) & (reward == reward)


@rf.pipeline(placements=PLACEMENTS)
def twice(cfg: rf.Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-3))

    def attempt():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
        samples = ops.rollout(actor, prompts, n=4, max_new_tokens=4, temperature=1.5)
        reward = ops.reward(letters, samples, name="letters")
        return samples, reward, ops.informative(samples, reward)

    def chosen():
        few = ops.repeat(
            attempt, until="informative", groups=2, at_most=3, exhausted="fill", name="mixed"
        )
        return few, best(few)

    batch = ops.repeat(chosen, until="best", groups=3, at_most=3, exhausted="fill", name="enough")
    ops.metrics(batch.only("group"), name="seen")
    ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())
