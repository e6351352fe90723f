"""PPO on GSM8K with hub models: four models on the GPUs of one node or of eight.

    rlflow plan pipelines/ppo_gsm8k.py --placement split --devices h100:8 --model-shape qwen2.5-7b
    rlflow tune pipelines/ppo_gsm8k.py --devices h200:64 --model-shape qwen2.5-7b

Models and data are named as in grpo_gsm8k.py, and may be local as there.
"""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow import ops
from rlflow.data import extract_gsm8k, last_number, same_number


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 500
    prompts_per_iteration: int = 512
    mini_batches: int = 4
    max_new_tokens: int = 512
    kl_coef: float = 0.001
    lr: float = 1e-6
    critic_lr: float = 1e-5
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    data: str = "openai/gsm8k"


def correct(response: str, answer: str) -> float:
    found, wanted = last_number(response), extract_gsm8k(answer)
    return float(found is not None and wanted is not None and same_number(found, wanted))


def placed(train: int, gen: int) -> rf.Placement:
    """Training on some devices; rollouts on others, with the models that only look."""
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")}
    return rf.Placement(pools={"train": train, "gen": gen}, assign=assign)


def in_turns(devices: int, tp: int, share: float | None = None) -> rf.Placement:
    """Training and SGLang on the same devices in turn, the layers of the backward computed again.

    The engine's pool of keys and values has what a `share` of a device's memory leaves beside its
    weights; without one what the rollouts need.
    """
    return rf.Placement(
        pools={"all": devices},
        assign={
            "*": rf.on("all"),
            "actor.train": rf.on("all", recompute=True),
            "critic": rf.on("all", recompute=True),
            "actor.rollout": rf.on("all", tp=tp, engine=rf.SGLang(mem_fraction_static=share)),
        },
    )


@rf.pipeline(
    placements={
        "one": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "colocate": rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")}),
        "split": placed(4, 4),
        "sglang": rf.Placement(
            pools={"train": 4, "gen": 4},
            assign={
                "*": rf.on("train"),
                "actor.train": rf.on("train", recompute=True),
                "critic": rf.on("train", recompute=True),
                "actor.rollout": rf.on("gen", engine="sglang"),
            },
        ),
        "sglang_colocate": in_turns(8, tp=2),
        "sglang_one": in_turns(1, tp=1, share=0.5),
        "rack": rf.Placement(pools={"all": 64}, assign={"*": rf.on("all")}),
        "rack_split": placed(32, 32),
    }
)
def ppo_gsm8k(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=cfg.lr), dtype="bfloat16")
    adam = rf.AdamW(lr=cfg.critic_lr)
    critic = rf.Model("critic", cfg.model, head="value", optimizer=adam, dtype="bfloat16")
    ref = rf.Model("ref", cfg.model, dtype="bfloat16")
    local = Path(cfg.data).is_file() or cfg.data != "openai/gsm8k"
    rows = rf.data.huggingface(
        cfg.data,
        split="train",
        subset=None if local else "main",
        columns=("prompt", "answer"),
        rename={"question": "prompt"},
    )
    prompts = ops.prompts(rows, batch=cfg.prompts_per_iteration)
    samples = ops.rollout(actor, prompts, max_new_tokens=cfg.max_new_tokens, chat=True)
    reward = ops.reward(correct, samples)
    ref_lp = ops.log_probs(ref, samples)
    values = ops.values(critic, samples)
    adv = ops.advantage("gae", samples, reward, values, ref_lp, kl_coef=cfg.kl_coef)
    parts = cfg.mini_batches
    ops.update(critic, samples, values, adv, loss=rf.ValueLoss(), mini_batches=parts)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"), mini_batches=parts)
