"""A rollout whose replicas move rows to each other after every so many turns."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    lr: float = 1e-3
    balance: int | None = 3


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


PLACEMENTS = {"together": together(), "apart": apart(), "replicas": apart(gen=2)}
PLACEMENTS |= {"ahead": apart(gen=2, staleness=1)}


@rf.pipeline(placements=PLACEMENTS)
def balanced(cfg: Config) -> None:
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=6)
    sampling = {"n": 2, "max_new_tokens": 24, "temperature": 3.0}
    samples = ops.rollout(actor, prompts, balance=cfg.balance, **sampling)
    reward = ops.reward(letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
