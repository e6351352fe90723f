"""The pipeline of `learning_continuous.py`: `pipelines/async_grpo.py` in other placements."""

from __future__ import annotations

from pathlib import Path

import rlflow as rf
from rlflow.cli.config import load_pipeline
from rlflow.graph.pipeline import Pipeline

FILE = Path(__file__).resolve().parents[1] / "pipelines" / "async_grpo.py"


def declared() -> Pipeline:
    """The pipeline of that file."""
    return load_pipeline(str(FILE))


class Config(declared().config):  # type: ignore[misc]
    """The same."""


def placed(staleness: int, *, continuous: bool = False) -> rf.Placement:
    """The pools of that file, with more or less staleness."""
    said = {"staleness": staleness, "continuous": continuous}
    return declared().placements["split"].model_copy(update=said)


@rf.pipeline(
    placements={
        "synchronous": placed(0),
        "stale": placed(2),
        "continuous": placed(2, continuous=True),
    },
)
def async_grpo(cfg: Config) -> None:
    """The graph of that file."""
    declared().function(cfg)
