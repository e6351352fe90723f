"""Parts C, D, E: runs by the command, on the device that is there.

C has a real SGLang beside the trainer, D learns, E compares what was planned with what torch holds.
On a CPU a few iterations of D run; the rest is of a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, ROOT
from tests.gpu.conftest import HALF_BILLION
from tests.gpu.test_throughput import record

pytestmark = pytest.mark.torch

ARITHMETIC = PIPELINES / "grpo_arithmetic.py"
HAS_SGLANG = bool(os.environ.get("RLFLOW_SGLANG_PYTHON")) or bool(
    importlib.util.find_spec("sglang")
)
sglang = pytest.mark.skipif(not HAS_SGLANG, reason="no SGLang is installed")


@pytest.fixture
def run(rlflow: Any, device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that runs a pipeline and returns its directory; a GPU is found, not named."""
    monkeypatch.chdir(ROOT)
    made: list[Path] = []

    def call(file: Path, *words: Any, resume: Path | None = None) -> Path:
        folder = resume or tmp_path / f"run{len(made)}"
        made.append(folder)
        where = ("--devices", "cpu:1") if device.type == "cpu" else ()
        target = ("--resume", folder) if resume else ("--run-dir", folder)
        result = rlflow("run", file, *where, *words, *target)
        assert 0 == result.code, result.err
        return folder

    return call


def rewards(folder: Path) -> list[float]:
    lines = [line.metrics for line in read_metrics(folder / "metrics.jsonl")]
    return [metrics["reward/mean"] for metrics in lines if "reward/mean" in metrics]


def test_it_learns(run: Any, big: bool) -> None:
    """Addition of two digits: 150 iterations from a model that gets some right already."""
    count = 150 if big else 3
    folder = run(ARITHMETIC, "--iterations", count, "--set", "eval_every=1000")
    found = rewards(folder)
    assert count == len(found)
    if big:
        assert sum(found[-20:]) / 20 > sum(found[:20]) / 20 + 0.1
        assert "local" == json.loads((folder / "plan.json").read_text())["backend"]


@sglang
@pytest.mark.slow
def test_it_learns_with_sglang_beside_it(run: Any, gpu: Any) -> None:
    """Colocated: every update goes to the engine and is compared with what it holds."""
    words = ("--placement", "colocate", "--engine", "sglang", "--check-sync")
    folder = run(ARITHMETIC, *words, "--iterations", 40, "--set", "eval_every=1000")
    before = rewards(folder)
    assert sum(before[-10:]) / 10 > sum(before[:10]) / 10
    again = rewards(run(ARITHMETIC, *words, "--iterations", 44, resume=folder))
    assert 44 == len(again)
    assert before == again[:40]


def test_the_plan_holds_what_torch_holds(run: Any, gpu: Any, model_of: Any) -> None:
    """Peak bytes of a run of half a billion parameters, within 5 % of the plan's."""
    path = Path(model_of(HALF_BILLION, weights=True))
    for file in (ROOT / "pipelines" / "assets" / "arith-tiny").glob("tokenizer*"):
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
