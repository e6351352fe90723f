"""`pipelines/grpo_arithmetic.py` with SGLang beside the trainer, as the test's machine has it."""

from __future__ import annotations

import json
import os

import rlflow as rf
from rlflow.cli.config import load_pipeline
from rlflow.graph.pipeline import Pipeline
from tests.conftest import PIPELINES

# Options that the SGLang of this machine needs: what it lacks, it must not be asked.
ENGINE = rf.SGLang(**json.loads(os.environ.get("RLFLOW_TEST_ENGINE", "{}")))


def declared() -> Pipeline:
    """The pipeline of that file."""
    return load_pipeline(str(PIPELINES / "grpo_arithmetic.py"))


class Config(declared().config):  # type: ignore[misc]
    """The same."""


@rf.pipeline(
    placements={
        "colocate": rf.Placement(
            pools={"all": 1},
            assign={"*": rf.on("all"), "actor.rollout": rf.on("all", engine=ENGINE, weights="own")},
        )
    }
)
def grpo(cfg: Config) -> None:
    """The graph of that file."""
    declared().function(cfg)
