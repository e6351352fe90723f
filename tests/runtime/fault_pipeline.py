"""Greedy rollouts of an engine whose rows, tokens and versions are written down as they are read.

Every response has a reward of its own, and the advantages of a batch differ, so that each
iteration's weights decide the next one's tokens.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

import rlflow as rf
from rlflow import ops
from tests.runtime.engine_pipeline import TINY, colocated, split


class Config(rf.Config):
    """`seen` is the file of what was read, a line a batch."""

    iterations: int = 3
    seen: str = "seen.jsonl"


def judge(response: str) -> float:
    return float(zlib.crc32(response.encode()) % 5)


@rf.op(per="batch")
def written(
    sample: rf.Row[int],
    response_tokens: rf.Token[int],
    version: rf.Token[int],
    *,
    path: str,
) -> rf.Row[float]:
    """How long each response is, after a line with the rows: number, tokens, versions."""

    def rows(field: Any) -> list[list[int]]:
        return [row.tolist() for row in field.unbind()]

    line = list(zip(sample.tolist(), rows(response_tokens), rows(version), strict=True))
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return torch.tensor([float(len(row)) for _, row, _ in line])


@rf.pipeline(
    placements={
        "split": split("sglang"),
        "ranks": split("sglang", gen=2, tp=2),
        "colocate": colocated("sglang"),
        "stream": split("sglang").model_copy(update={"stream": 2}),
        "vllm": split("vllm"),
    }
)
def greedy(cfg: Config) -> None:
    actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=3e-3))
    ref = rf.Model("ref", str(TINY))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=48, temperature=0.0, ignore_eos=True)
    reward = ops.reward(judge, samples)
    ops.metrics(written(samples, path=cfg.seen))
    ref_lp = ops.log_probs(ref, samples)
    advantage = ops.advantage("reinforce++", samples, reward)
    ops.update(actor, samples, advantage, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.02))
