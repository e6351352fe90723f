"""A policy that trains adapters."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    pass


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(placements={"together": together(), "split": apart()})
def adapted(cfg: Config) -> None:
    adapters = rf.LoRA(rank=2, alpha=8, targets=("q_proj", "down_proj"))
    actor = rf.Model("actor", TINY, optimizer=rf.AdamW(lr=1e-2), lora=adapters)
    samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=4), n=4, max_new_tokens=6)
    adv = ops.advantage("grpo", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
