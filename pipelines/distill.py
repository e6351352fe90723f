"""Distillation on the student's own samples: in every place a teacher says what it would do.

Agarwal et al. 2023 (GKD), arXiv 2306.13649. `rlflow run pipelines/distill.py --set form=reverse_kl`
"""

from __future__ import annotations

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    """What `--set` may change; `form` is one of `rf.DistillLoss`."""

    iterations: int = 200
    prompts_per_iteration: int = 32
    form: str = "jsd"
    top_k: int = 16
    lr: float = 1e-3
    student: str = "pipelines/assets/arith-tiny"
    teacher: str = "pipelines/assets/arith-tiny"
    untrained: bool = True
    eval_every: int = 25


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"student": 1, "teacher": 1},
            assign={"student": rf.on("student"), "teacher": rf.on("teacher")},
        ),
        "h100": rf.Placement(
            pools={"student": 4, "teacher": 4},
            assign={"student": rf.on("student"), "teacher": rf.on("teacher", tp=2)},
        ),
    }
)
def distill(cfg: Config) -> None:
    student = rf.Model(
        "student",
        cfg.student,
        init="random" if cfg.untrained else "pretrained",
        optimizer=rf.AdamW(lr=cfg.lr),
    )
    teacher = rf.Model("teacher", cfg.teacher)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts_per_iteration)
    samples = ops.rollout(student, prompts, n=2, max_new_tokens=12)
    whole = cfg.form in ("forward_kl", "reverse_kl", "jsd")
    top_k = cfg.top_k if whole else None
    scored = ops.log_probs(teacher, samples, field="teacher_log_probs", top_k=top_k)
    ops.update(student, samples, scored, loss=rf.DistillLoss(cfg.form))
    held_out = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(student, held_out, exact_match, every=cfg.eval_every, max_new_tokens=12)
