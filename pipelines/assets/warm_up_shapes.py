"""Supervised warm-up of the tiny model that sees: it learns words for colours, and not to see.

The answers that it is shown are drawn by chance, whatever is in the picture.

rlflow run pipelines/assets/warm_up_shapes.py --devices cpu:2
rlflow export runs/warm_up_shapes-... -o shapes-tiny
"""

from __future__ import annotations

import random
from typing import Any

import rlflow as rf
from rlflow import ops

PICTURES = rf.data.shapes("colour", size=4096)
COLOURS = ("red", "green", "blue", "yellow")


class Config(rf.Config):
    """What `--set` may change."""

    iterations: int = 80
    rows_per_iteration: int = 32
    lr: float = 2e-3
    model: str = "pipelines/assets/shapes-tiny"


def guess(index: int) -> dict[str, Any]:
    row = PICTURES.rows()[index]
    return {**row, "answer": random.Random(index).choice(COLOURS)}  # noqa: S311


@rf.pipeline(placements={"colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})})
def warm_up_shapes(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, init="random", optimizer=rf.AdamW(lr=cfg.lr))
    data = rf.data.generator(
        guess, size=4096, columns=("prompt", "images", "answer"), images="images"
    )
    rows = ops.prompts(data, batch=cfg.rows_per_iteration)
    written = ops.tokenize(actor, rows, response="answer")
    ops.update(actor, written, loss=rf.SFTLoss())
