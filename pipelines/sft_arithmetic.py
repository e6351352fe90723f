"""Supervised warm start: trains the tiny model that `pipelines/assets/arith-tiny` ships.

Starts from random weights and sees 900 of the 10,000 problems only: the model is sure of
itself and right about a third of the time, which leaves RL its work.

    rlflow run pipelines/sft_arithmetic.py --run-dir runs/sft
    rlflow export runs/sft -o pipelines/assets/arith-tiny
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 1000
    batch: int = 128
    lr: float = 5e-4
    model: str = "pipelines/assets/arith-tiny"
    problems: int = 900
    eval_every: int = 200


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def sft(cfg: Config) -> None:
    decay = rf.AdamW(lr=cfg.lr, schedule="linear", total_steps=cfg.iterations)
    student = rf.Model("student", cfg.model, init="random", optimizer=decay)
    few = rf.data.arithmetic(digits=2, test_size=10_000 - cfg.problems)
    prompts = ops.prompts(few, batch=cfg.batch)
    written = ops.tokenize(student, prompts, response="answer")
    ops.update(student, written, loss=rf.SFTLoss())
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(student, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
    ops.evaluate(student, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12,
                 temperature=1.0, name="eval_sampled")
