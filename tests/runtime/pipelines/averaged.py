"""A reference that is an average of the actor."""

import rlflow as rf
from rlflow import ops
from tests.runtime.pipelines.placed import TINY, apart, together


class Config(rf.Config):
    decay: float = 0.9
    every: int = 1
    frozen: bool = False
    rank: int = 0
    dtype: str = "float32"
    other: str = TINY


def mixed(response: str) -> float:
    return sum(ord(letter) for letter in response) % 7 / 7


@rf.pipeline(
    placements={
        "together": together(),
        "split": apart("ref"),
        "fsdp": together(2),
        "tp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", tp=2)}),
    }
)
def averaged(cfg: Config) -> None:
    lora = rf.LoRA(rank=cfg.rank, targets=("q_proj", "down_proj")) if cfg.rank else None
    adam, mean = rf.AdamW(lr=1e-2), rf.Average(decay=cfg.decay)
    actor = rf.Model("actor", TINY, optimizer=adam, lora=lora, dtype=cfg.dtype)
    ref = (
        rf.Model("ref", TINY)
        if cfg.frozen
        else rf.Model("ref", cfg.other, optimizer=mean, lora=lora)
    )
    samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=2), n=4, max_new_tokens=4)
    given = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, ops.reward(mixed, samples))
    ops.update(actor, samples, adv, given, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.1))
    if not cfg.frozen:
        ops.average(ref, actor, every=cfg.every)
