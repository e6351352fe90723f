"""A policy that sees, and whose vision tower stays as it is."""

import rlflow as rf
from rlflow import ops
from tests.conftest import PIPELINES
from tests.runtime.pipelines.placed import apart, together

SHAPES = str(PIPELINES / "assets" / "shapes-tiny")


class Config(rf.Config):
    pass


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(placements={"together": together(), "split": apart()})
def frozen(cfg: Config) -> None:
    actor = rf.Model("actor", SHAPES, optimizer=rf.AdamW(lr=1e-2), freeze="vision")
    samples = ops.rollout(actor, ops.prompts(rf.data.shapes(), batch=4), n=4, max_new_tokens=4)
    adv = ops.advantage("grpo", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
