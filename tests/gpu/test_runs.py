"""Parts D and E: runs by the command, on the device that is there.

D learns, E compares what was planned with what torch holds. On a CPU a few iterations of D run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import PIPELINES, TINY
from tests.gpu.conftest import HALF_BILLION, learned
from tests.gpu.test_throughput import record

pytestmark = pytest.mark.torch

ARITHMETIC = PIPELINES / "grpo_arithmetic.py"


def test_it_learns(run: Any, big: bool) -> None:
    """Addition of two digits: 150 iterations from a model that gets some right already."""
    count = 150 if big else 3
    folder = run(ARITHMETIC, "--iterations", count, "--set", "eval_every=1000")
    found = [line["reward/mean"] for line in learned(folder)]
    assert count == len(found)
    if big:
        assert sum(found[-20:]) / 20 > sum(found[:20]) / 20 + 0.1
        assert "local" == json.loads((folder / "plan.json").read_text())["backend"]


def test_the_plan_holds_what_torch_holds(run: Any, gpu: Any, model_of: Any) -> None:
    """Peak bytes of a run of half a billion parameters, within 5 % of the plan's."""
    path = Path(model_of(HALF_BILLION, weights=True))
    for file in TINY.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(gpu)
    start = torch.cuda.memory_allocated(gpu)
    more = ("--set", f"model={path}", "--set", "eval_every=1000", "--iterations", 3)
    folder = run(ARITHMETIC, *more)
    peak = torch.cuda.max_memory_allocated(gpu) - start
    planned = json.loads((folder / "plan.json").read_text())["peaks"]["0"]
    record("planned and held bytes", {"planned": planned, "held": peak})
    assert 0.95 < peak / planned < 1.05
