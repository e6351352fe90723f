"""Runs whose parts sleep and wake beside the compute give the bytes of runs where all fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import PIPELINES, QUICK, SMALL

pytestmark = pytest.mark.torch

OWN = """
import rlflow as rf
own = rf.Placement(
    pools={"all": 1},
    assign={"*": rf.on("all"), "actor.rollout": rf.on("all", weights="own")},
)
"""


@pytest.fixture
def train(rlflow, tmp_path, monkeypatch):
    """Run a pipeline for a few iterations; returns its directory and its plan."""
    monkeypatch.chdir(tmp_path)

    def call(name, pipeline, *words):
        where = tmp_path / name
        options = ("--iterations", 4, "--run-dir", where, "-q")
        result = rlflow("run", pipeline, *QUICK, *SMALL, *words, *options)
        assert 0 == result.code, result.err
        return where, json.loads((where / "plan.json").read_text())

    return call


def weights(run: Path) -> dict[str, bytes]:
    """The bytes of the last checkpoint's tensors by component and name."""
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return {
        f"{file.stem}/{name}": tensor.contiguous().view(-1).numpy().tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def tightest(plan: dict) -> int:
    """Bytes that the largest action needs by itself, and an eighth of what else there is."""
    sizes = {part["name"]: part["size"] for part in plan["parts"]}
    alone = max(
        sum(sizes[name] for name in action["needs"]) + action["cost"]["transient"]
        for action in plan["actions"]
    )
    return alone + (max(plan["peaks"].values()) - alone) // 8


@pytest.mark.parametrize("name", ["ppo_arithmetic.py", "grpo_arithmetic.py"])
def test_memory_pressure_does_not_change_a_bit(train, name):
    wide, plan = train("wide", PIPELINES / name, "--devices", "cpu:1")
    tight, pressed = train(
        "tight", PIPELINES / name, "--devices", f"cpu:1@{tightest(plan) / 1e6:.3f}MB"
    )
    assert not {"sleep", "wake"} & {action["kind"] for action in plan["actions"]}
    assert {"sleep", "wake"} <= {action["kind"] for action in pressed["actions"]}
    assert (wide / "metrics.jsonl").read_bytes() == (tight / "metrics.jsonl").read_bytes()
    assert weights(wide) == weights(tight)
