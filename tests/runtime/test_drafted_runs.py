"""Runs with a drafter that learns in the background: the same samples, ever better proposals."""

from __future__ import annotations

import json

import pytest
import torch

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, TINY
from tests.runtime.test_chunks import weights

pytestmark = pytest.mark.torch

WITH = "max_new_tokens=12, drafter=drafter, draft_tokens=drafts\n"
WITHOUT = "max_new_tokens=12\n"


@pytest.fixture
def run(rlflow, tmp_path, monkeypatch):
    """Run the pipeline with a drafter, or without one; its metrics, and the run directory."""
    monkeypatch.chdir(tmp_path)
    text = (PIPELINES / "drafted_grpo.py").read_text()
    text = text.replace('"pipelines/assets/arith-tiny', f'"{TINY}')
    (tmp_path / "drafted.py").write_text(text)
    plain = text.replace(WITH, WITHOUT)
    assert plain != text
    (tmp_path / "plain.py").write_text(plain)

    def call(name: str, placement: str, iterations: int):
        where = tmp_path / f"{name}-{placement}"
        devices = "cpu:1" if placement == "colocate" else "cpu:2"
        words = ("--placement", placement, "--devices", devices, "--threads", "1")
        words += ("--iterations", str(iterations), "--run-dir", str(where), "-q", *QUICK)
        words += ("--set", "prompts_per_iteration=16", "--set", "draft_tokens=2")
        result = rlflow("run", tmp_path / f"{name}.py", *words)
        assert 0 == result.code, result.err
        return [line.metrics for line in read_metrics(where / "metrics.jsonl")], where

    return call


@pytest.mark.slow
def test_a_drafter_changes_no_sample_and_its_proposals_get_better(run):
    """Passes of other shapes add in another order, so losses agree to rounding."""
    drafted, there = run("drafted", "split", 16)
    plain, here = run("plain", "split", 16)
    for one, other in zip(drafted, plain, strict=True):
        for name, value in other.items():
            close = pytest.approx(value, rel=1e-3, abs=1e-4)
            exact = name.startswith("reward/") or "length" in name
            assert one[name] == (value if exact else close), name
    for name, tensor in weights(there).items():
        if name.startswith("actor/"):
            torch.testing.assert_close(tensor, weights(here)[name], rtol=1e-3, atol=1e-4)
    name = "actor.rollout/acceptance"
    accepted = [line[name] for line in drafted if name in line]
    assert max(accepted[:2]) < 0.05
    assert sum(accepted[-4:]) / 4 > 3 * max(accepted[0], 0.01)


@pytest.mark.slow
def test_its_steps_run_while_the_policy_samples_the_next_rows(run):
    """Together they fill the device that trains, and the other one's work hides behind it."""
    _, where = run("drafted", "split", 4)
    plan = json.loads((where / "plan.json").read_text())
    steps = [a for a in plan["actions"] if a["node"] == "drafter.update"]
    assert [f"drafter.update[{n}/4]" for n in (1, 2, 3, 4)] == [a["id"] for a in steps]
    (rollout,) = (a for a in plan["actions"] if a["node"] == "actor.rollout")
    assert ["drafter@gen", 1] in rollout["reads"]
    assert plan["timing"]["resource_bound"] == pytest.approx(plan["timing"]["period"], rel=0.02)
