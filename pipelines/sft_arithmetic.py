"""Supervised warm start: trains the tiny model that `pipelines/assets/arith-tiny` ships.

A high, constant learning rate leaves the model rough: greedy decoding is right about a
third of the time, and RL smooths and sharpens it.

    rlflow run pipelines/sft_arithmetic.py --run-dir runs/sft
    rlflow export runs/sft -o pipelines/assets/arith-tiny
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 598
    batch: int = 128
    lr: float = 2e-3
    model: str = "pipelines/assets/arith-tiny"
    eval_every: int = 50


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def sft(cfg: Config) -> None:
    student = rf.Model("student", cfg.model, init="random", optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.batch)
    written = ops.tokenize(student, prompts, response="answer")
    ops.update(student, written, loss=rf.SFTLoss())
    test, every = rf.data.arithmetic(digits=2, split="test"), cfg.eval_every
    ops.evaluate(student, test, exact_match, every=every, max_new_tokens=12)
    ops.evaluate(
        student, test, exact_match, every=every, max_new_tokens=12, temperature=1.0, name="sampled"
    )
