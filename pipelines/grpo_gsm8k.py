"""GRPO on GSM8K with a hub model: where a GPU user starts from.

    rlflow plan pipelines/grpo_gsm8k.py --placement colocate --devices h100:8
    rlflow plan pipelines/grpo_gsm8k.py --placement sglang_colocate --devices h100:8
    rlflow run  pipelines/grpo_gsm8k.py --set model=DIR --set data=FILE.jsonl --placement one

`one`, `colocate` and `split` generate with rlflow's own engine; those of `sglang` with SGLang: on
GPUs of its own, on all of them in turn with the training (`_colocate`), or on the only one.

The model and the data set are named as on the hub; a local directory and a local JSONL
or Parquet file of the same columns (`question`, `answer` ending in `#### 42`) do as well;
of a single file the evaluation reads the same rows.
"""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow import ops
from rlflow.data import extract_gsm8k, last_number, same_number


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 500
    prompts_per_iteration: int = 64
    group_size: int = 8
    max_new_tokens: int = 512
    kl_coef: float = 0.001
    lr: float = 1e-6
    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    data: str = "openai/gsm8k"
    eval_every: int = 20
    eval_limit: int = 256


def correct(response: str, answer: str) -> float:
    found, wanted = last_number(response), extract_gsm8k(answer)
    return float(found is not None and wanted is not None and same_number(found, wanted))


def questions(name: str, split: str) -> rf.data.DataSource:
    return rf.data.huggingface(
        name,
        split="train" if Path(name).is_file() else split,
        subset="main" if name == "openai/gsm8k" else None,
        columns=("prompt", "answer"),
        rename={"question": "prompt"},
    )


everything = {"*": rf.on("all")}


def in_turns(devices: int, tp: int, share: float | None = None) -> rf.Placement:
    """Training and SGLang on the same devices in turn, the layers of the backward computed again.

    The engine's pool of keys and values has what a `share` of a device's memory leaves beside its
    weights; without one what the rollouts need.
    """
    return rf.Placement(
        pools={"all": devices},
        assign={
            **everything,
            "actor.train": rf.on("all", recompute=True),
            "actor.rollout": rf.on("all", tp=tp, engine=rf.SGLang(mem_fraction_static=share)),
        },
    )


@rf.pipeline(
    placements={
        "one": rf.Placement(pools={"all": 1}, assign=everything),
        "colocate": rf.Placement(pools={"all": 8}, assign=everything),
        "split": rf.Placement(
            pools={"train": 4, "gen": 4},
            assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")},
        ),
        "sglang": rf.Placement(
            pools={"train": 4, "gen": 4},
            assign={
                "*": rf.on("train"),
                "actor.train": rf.on("train", recompute=True),
                "actor.rollout": rf.on("gen", engine="sglang"),
            },
        ),
        "sglang_colocate": in_turns(8, tp=2),
        "sglang_one": in_turns(1, tp=1, share=0.5),
    }
)
def grpo_gsm8k(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, dtype="bfloat16", optimizer=rf.AdamW(lr=cfg.lr))
    ref = rf.Model("ref", cfg.model, dtype="bfloat16")
    prompts = ops.prompts(questions(cfg.data, "train"), batch=cfg.prompts_per_iteration)
    longest = cfg.max_new_tokens
    samples = ops.rollout(actor, prompts, n=cfg.group_size, max_new_tokens=longest, chat=True)
    reward = ops.reward(correct, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss("ppo_clip", clip=(0.2, 0.28), kl_coef=cfg.kl_coef)
    ops.update(actor, samples, adv, ref_lp, loss=loss)
    held_out = questions(cfg.data, "test")
    every, limit = cfg.eval_every, cfg.eval_limit
    ops.evaluate(
        actor, held_out, correct, every=every, limit=limit, max_new_tokens=longest, chat=True
    )
