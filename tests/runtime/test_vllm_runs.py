"""Runs whose rollouts are the real vLLM's, where it is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlflow.graph.user.engines import VLLM
from tests.conftest import ended, process
from tests.runtime.test_engine_faults import Fault, Ran, goes_on_alike, kill
from tests.runtime.test_engine_runs import FILE, MARK, TIGHT, left, metrics_of

PYTHON = os.environ.get("RLFLOW_VLLM_PYTHON", "")


pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="RLFLOW_VLLM_PYTHON names no interpreter"),
]


@pytest.mark.parametrize(
    "words",
    [("vllm",), ("vllm", "--stream", 2), ("vllm_colocated", "--devices", f"cpu:1@{TIGHT / 1e6}MB")],
    ids=["split", "streamed", "colocated"],
)
def test_grpo_runs_with_vllm(words: tuple[object, ...], tmp_path: Path) -> None:
    """Log-probs are the trainer's within 1e-4 after every update, and nothing is left."""
    folder = tmp_path / "run"
    said = ("--check-sync", "--iterations", 3, "--run-dir", folder, "--threads", 1)
    command = process(
        "run", FILE, "--placement", *words, *said, cwd=tmp_path, **{MARK: str(tmp_path)}
    )
    done = ended(command, timeout=280)
    assert 0 == done.code, done.err
    found = metrics_of(folder)
    assert 3 == len(found)
    assert all(metrics["actor.update/rollout_gap_max"] < 1e-4 for metrics in found)
    assert [] == left(tmp_path)


def test_a_run_goes_on_where_its_engine_is_killed(rlflow, tmp_path, monkeypatch):
    """In the second generation, once some of it has come."""
    words = ("--placement", "vllm")
    whole = Ran(rlflow, tmp_path / "whole", *words)
    assert 0 == whole.result.code, whole.result.err
    watch = Fault("generate", kill, 2, loader=VLLM.loader)
    goes_on_alike(whole, watch, words, rlflow, tmp_path, monkeypatch)
