"""Adaptive coefficients on Ray: each rank has the same, and they come back with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.runtime.adaptive_pipeline import ADAPTIVE

pytestmark = [pytest.mark.ray, pytest.mark.torch]


@pytest.fixture
def train(rlflow, tmp_path, monkeypatch):
    """Run the pipeline, or continue a run of it; returns the run directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "adaptive.py"
    file.write_text(ADAPTIVE)

    def call(name, *words, iterations, resume=False):
        where = ("--resume" if resume else "--run-dir", tmp_path / name)
        options = ("--iterations", iterations, "--save-every", 2, "--threads", "1", "-q")
        result = rlflow("run", file, *words, *options, *where)
        assert 0 == result.code, result.err
        return tmp_path / name

    return call


def nodes(run: Path) -> dict[str, dict[str, float]]:
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    kept: dict[str, dict[str, float]] = json.loads((last / "manifest.json").read_text())["state"]
    return kept["nodes"]


def tensors(run: Path) -> dict[str, bytes]:
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return {
        f"{file.stem}/{name}": tensor.numpy().tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_one_process_a_device_keeps_what_one_process_keeps(train):
    here = train("here", "--placement", "one", iterations=3)
    there = train("there", "--placement", "one", "--backend", "ray", iterations=3)
    assert (here / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    assert nodes(here) == nodes(there)
    assert {"actor.update", "advantage"} == nodes(there).keys()


@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_is_one_that_was_not_stopped(train):
    words = ("--placement", "two", "--devices", "cpu:2")
    whole = train("whole", *words, iterations=5)
    train("parts", *words, iterations=3)
    parts = train("parts", *words, iterations=5, resume=True)
    assert (whole / "metrics.jsonl").read_bytes() == (parts / "metrics.jsonl").read_bytes()
    assert nodes(whole) == nodes(parts)
    assert tensors(whole) == tensors(parts)
