"""Runs whose optimizer's state stays on the host: the bits of a resident one, also resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PIPELINES, QUICK, SMALL, TINY
from tests.runtime import whole_runs
from tests.runtime.whole_runs import Declared

pytestmark = pytest.mark.torch

GRPO = PIPELINES / "grpo_arithmetic.py"
WORDS = (*SMALL, *QUICK, "--set", "group_size=4", "--devices", "cpu:2", "--save-every", 2)
VISITING = """\
import rlflow as rf

placement = rf.Placement(
    pools={"train": 1, "gen": 1},
    assign={
        "*": rf.on("train", offload="optimizer"),
        "actor.rollout": rf.on("gen"),
        "ref": rf.on("gen"),
    },
)
"""


@pytest.fixture
def visiting(tmp_path: Path) -> Path:
    path = tmp_path / "visiting.py"
    path.write_text(VISITING)
    return path


def run(
    rlflow: Any,
    where: tuple[object, ...],
    placement: object,
    iterations: int,
    pipeline: Path = GRPO,
) -> None:
    words = (*WORDS, "--placement", placement, "--iterations", iterations)
    result = rlflow("run", pipeline, *words, *where)
    assert result.code == 0, result.err


@pytest.mark.slow
@pytest.mark.parametrize("first", ["visiting", "resident"])
def test_a_run_goes_on_with_its_state_elsewhere(
    first: str, rlflow: Any, train: Any, visiting: Path, tmp_path: Path
) -> None:
    whole = train(Declared(str(GRPO), (*WORDS, "--placement", "split", "--iterations", 4)), "split")
    begun, ended = (visiting, "split") if first == "visiting" else ("split", visiting)
    where = tmp_path / "run"
    run(rlflow, ("--run-dir", where), begun, 2)
    run(rlflow, ("--resume", where), ended, 4)
    assert whole_runs.tensors(whole) == whole_runs.tensors(where)
    assert whole_runs.numbers(whole) == whole_runs.numbers(where)


@pytest.mark.slow
def test_low_moments_resume_to_the_same_bits(rlflow: Any, visiting: Path, tmp_path: Path) -> None:
    """Which hash rounds them is the step's; half of the run has them on the host."""
    text = GRPO.read_text().replace("rf.AdamW(", 'rf.AdamW(moments="bfloat16", ')
    pipeline = tmp_path / "low.py"
    pipeline.write_text(text.replace("pipelines/assets/arith-tiny", str(TINY)))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(rlflow, ("--run-dir", whole), "split", 4, pipeline)
    run(rlflow, ("--run-dir", parts), visiting, 2, pipeline)
    run(rlflow, ("--resume", parts), "split", 4, pipeline)
    assert whole_runs.tensors(whole) == whole_runs.tensors(parts)
    assert whole_runs.numbers(whole) == whole_runs.numbers(parts)
