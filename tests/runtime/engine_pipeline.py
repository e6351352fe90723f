"""GRPO on arithmetic whose rollouts are an engine's, in placements that runs and tests compare."""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow import ops

TINY = Path(__file__).resolve().parents[2] / "pipelines" / "assets" / "arith-tiny"


class Config(rf.Config):
    prompts_per_iteration: int = 4
    group_size: int = 4
    temperature: float = 1.0
    iterations: int = 2
    broken: bool = False
    adapters: bool = False
    first_groups: int | None = None
    balance: int | None = None
    max_new_tokens: int = 8


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def failing(response: str, answer: str) -> float:
    raise ValueError("no reward today")


def colocated(engine: object) -> rf.Placement:
    return rf.Placement(
        pools={"all": 1},
        assign={"*": rf.on("all"), "actor.rollout": rf.on("all", engine=engine, weights="own")},
    )


def split(engine: object, gen: int = 1, tp: int = 1) -> rf.Placement:
    return rf.Placement(
        pools={"train": 1, "gen": gen},
        assign={
            "actor": rf.on("train"),
            "ref": rf.on("train"),
            "actor.rollout": rf.on("gen", engine=engine, tp=tp),
        },
    )


def hybrid(engine: object) -> rf.Placement:
    """Two replicas, one on the device that trains."""
    return rf.Placement(
        pools={"train": [0], "gen": [0, 1]},
        assign={
            "actor": rf.on("train"),
            "ref": rf.on("train"),
            "actor.rollout": rf.on("gen", engine=engine),
        },
    )


@rf.pipeline(
    placements={
        "colocate": colocated("sglang"),
        "split": split("sglang"),
        "ranks": split("sglang", gen=2, tp=2),
        "pair": split("sglang", gen=2),
        "hybrid": hybrid("sglang"),
        "disk": split(rf.SGLang(updates="disk")),
        "group": split(rf.SGLang(updates="group")),
        "stream": split("sglang").model_copy(update={"stream": 2}),
        "continuous": split("sglang").model_copy(update={"staleness": 3, "continuous": True}),
        "replicas": split("sglang", gen=2).model_copy(update={"staleness": 3, "continuous": True}),
        "vllm": split("vllm"),
        "vllm_colocated": colocated("vllm"),
        "embedded": colocated("torch"),
    }
)
def grpo(cfg: Config) -> None:
    lora = rf.LoRA(rank=4, targets=("q_proj", "down_proj")) if cfg.adapters else None
    actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3), lora=lora)
    ref = rf.Model("ref", str(TINY))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(
        actor,
        prompts,
        n=cfg.group_size,
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        first_groups=cfg.first_groups,
        balance=cfg.balance,
    )
    reward = ops.reward(failing if cfg.broken else exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    advantage = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss("ppo_clip", kl_coef=0.02)
    ops.update(actor, samples, advantage, ref_lp, loss=loss)
