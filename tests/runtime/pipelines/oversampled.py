"""A rollout that begins more groups than it makes; with `groups=6` it makes all that it begins."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    lr: float = 1e-3
    groups: int = 4


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


PLACEMENTS = {"together": together(), "apart": apart(), "ahead": apart(staleness=1)}
PLACEMENTS |= {"replicas": apart(gen=2)}


@rf.pipeline(placements=PLACEMENTS)
def oversampled(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=6)
    sampling = {"n": 2, "max_new_tokens": 24, "temperature": 3.0}
    samples = ops.rollout(actor, prompts, first_groups=cfg.groups, **sampling)
    reward = ops.reward(letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
