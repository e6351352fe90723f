"""The pipeline of `learning_sglang.py`: `pipelines/grpo_arithmetic.py` in more placements."""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow.cli.config import load_pipeline
from rlflow.graph.pipeline import Pipeline

FILE = Path(__file__).resolve().parents[1] / "pipelines" / "grpo_arithmetic.py"


def declared() -> Pipeline:
    """The pipeline of that file."""
    return load_pipeline(str(FILE))


class Config(declared().config):  # type: ignore[misc]
    """The same."""


@rf.pipeline(
    placements={
        "embedded": declared().placements["split"],
        "split": declared().placements["sglang"],
        "colocated": rf.Placement(
            pools={"all": 1},
            assign={"*": rf.on("all"), "actor.rollout": rf.on("all", engine="sglang")},
        ),
    }
)
def grpo(cfg: Config) -> None:
    """The graph of that file."""
    declared().function(cfg)
