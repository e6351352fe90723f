"""Supervised warm start: trains the tiny model that `pipelines/assets/arith-tiny` ships.

Starts from random weights and stops at a greedy accuracy of about 0.35, on purpose:
good enough that a sampled answer is sometimes right, bad enough to leave RL its work.
Save the weights with `python pipelines/assets/export.py RUN pipelines/assets/arith-tiny`.
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 850
    batch: int = 128
    lr: float = 1e-3
    model: str = "pipelines/assets/arith-tiny"
    digits: int = 2
    eval_every: int = 50


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def sft(cfg: Config) -> None:
    student = rf.Model("student", cfg.model, init="random", optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=cfg.digits), batch=cfg.batch)
    written = ops.tokenize(student, prompts, response="answer")
    ops.update(student, written, loss=rf.SFTLoss())
    held_out = rf.data.arithmetic(digits=cfg.digits, split="test")
    ops.evaluate(student, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
