"""Part C: a real SGLang on the trainer's device, by the command: 1.5 billion parameters on a GPU.

Start, rollouts, updates that are compared with what the engine holds, sleeps, a loss, a resume.
On a CPU the same runs with the tiny model.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.runtime.record.spans import read_spans
from tests.conftest import TINY as ASSETS
from tests.gpu.conftest import ONE_AND_A_HALF, learned
from tests.runtime.test_engine_faults import Fault, kill

HAS_SGLANG = bool(os.environ.get("RLFLOW_SGLANG_PYTHON")) or bool(
    importlib.util.find_spec("sglang")
)
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.extra,
    pytest.mark.skipif(not HAS_SGLANG, reason="no SGLang is installed"),
]
FILE = Path(__file__).with_name("sglang_pipeline.py")
ON_PLACE = ("--placement", "colocate", "--check-sync", "--set", "eval_every=1000")
# Too little for the optimizer and the engine's weights at once.
TIGHT = {"cpu": 36e6, "cuda": 35.5e9}


@pytest.fixture
def words(device: torch.device, big: bool, model_of: Any) -> tuple[Any, ...]:
    """Words of a run whose engine has to sleep, of the model of this device."""
    if not big:
        return (*ON_PLACE, "--devices", f"cpu:1@{TIGHT['cpu'] / 1e6:.0f}MB", "--threads", 1)
    path = Path(model_of(ONE_AND_A_HALF, weights=True))
    for file in ASSETS.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    there = torch.cuda.get_device_properties(device).total_memory
    return (
        *ON_PLACE,
        "--reserve",
        f"{100 * (1 - TIGHT['cuda'] / there):.0f}%",
        "--set",
        f"model={path}",
    )


def test_the_engine_sleeps_takes_weights_and_a_resumed_run_goes_on(
    run: Any, words: tuple[Any, ...]
) -> None:
    folder = run(FILE, *words, "--iterations", 2)
    kinds = {span.kind for span in read_spans(folder / "spans")}
    assert {"run", "sleep", "wake", "reshard"} <= kinds
    before = learned(folder)
    after = learned(run(FILE, *words, "--iterations", 3, resume=folder))
    assert (2, 3) == (len(before), len(after))
    assert before == after[:2]
    assert all(math.isfinite(value) for line in after for value in line.values())
    # What the engine drew with is what the trainer computes, but for the order of sums.
    assert all(line["actor.update/rollout_gap_max"] < 0.5 for line in after)


def test_a_lost_engine_is_replaced(
    run: Any, words: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed in its second rollout, once some of it has come."""
    watch = Fault("generate", kill, 2)
    watch.beset(monkeypatch)
    folder = run(FILE, *words, "--iterations", 3)
    for thread in watch.threads:
        thread.join()
    (model,) = watch.models
    assert (1, 2) == (len(watch.disturbed), model.replica.starts)
    assert 3 == len(learned(folder))


def test_it_learns_with_sglang_beside_it(run: Any, gpu: Any) -> None:
    """Colocated: every update goes to the engine and is compared with what it holds."""
    folder = run(FILE, *ON_PLACE, "--iterations", 40)
    before = [line["reward/mean"] for line in learned(folder)]
    assert sum(before[-10:]) / 10 > sum(before[:10]) / 10
    assert json.loads((folder / "plan.json").read_text())["backend"] == "local"
