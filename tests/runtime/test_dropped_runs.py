"""Whole runs in which rewards fail: the same in chunks, counted, and stopped above the share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlflow as rf
from rlflow import ops
from rlflow.errors import Finding, RewardError, UsageError
from rlflow.runtime.preflight import check_rewards
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import TINY

pytestmark = pytest.mark.torch

MINE = f"""
import asyncio
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    most: float = 0.9
    lost: int = 3
    policy: str = "drop_group"

async def sums(response: str, answer: str) -> float:
    await asyncio.sleep(0)
    return float(len(response))

def maths(response: str, lost: int) -> float:
    return float("nan") if sum(map(ord, response)) % lost == 0 else 1.0

@rf.pipeline(placements={{
    "whole": rf.Placement(pools={{"train": 1, "gen": 1}}, assign=ASSIGN),
    "chunks": rf.Placement(pools={{"train": 1, "gen": 1}}, assign=ASSIGN, stream=4),
}})
def mine(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-3))
    both = {{"sums": rf.data.arithmetic(), "maths": rf.data.arithmetic(operators="-")}}
    prompts = ops.prompts(rf.data.mix(both, {{"sums": 1, "maths": 3}}), batch=8)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6, ignore_eos=True)
    reward = ops.reward(
        {{"sums": sums, "maths": maths}}, samples,
        on_error=cfg.policy, max_failures=cfg.most, lost=cfg.lost,
    )
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss(), epochs=2, mini_batches=2)
""".replace("ASSIGN", '{"actor": rf.on("train"), "actor.rollout": rf.on("gen")}')


@pytest.fixture
def run(rlflow, tmp_path, monkeypatch):
    """Run the pipeline of this file with more words, on two devices of one thread."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)

    def call(*words, placement="whole"):
        where = tmp_path / placement
        options = ("--devices", "cpu:2", "--threads", "1", "--run-dir", where, "-q")
        return where, rlflow("run", "mine.py", "--placement", placement, *options, *words)

    return call


def numbers(where: Path) -> list[dict[str, float]]:
    return [line.metrics for line in read_metrics(where / "metrics.jsonl")]


def weights(where: Path) -> dict[str, torch.Tensor]:
    last = where / "checkpoints" / (where / "checkpoints" / "LATEST").read_text().strip()
    files = sorted(last.glob("*.safetensors"))
    return {f"{f.stem}/{name}": t for f in files for name, t in load_file(f).items()}


@pytest.mark.slow
def test_chunks_drop_the_same_samples(run):
    whole, result = run("--iterations", 2)
    assert 0 == result.code, result.err
    chunks, result = run("--iterations", 2, placement="chunks")
    assert 0 == result.code, result.err
    counts = {a["chunk"]["count"] for a in plan(chunks) if a["chunk"] and a["node"] == "reward"}
    assert {4} == counts
    for one, many in zip(numbers(whole), numbers(chunks), strict=True):
        assert one == pytest.approx(many, rel=1e-6)
        failed, dropped = one["reward_failures/failed"], one["reward_failures/dropped"]
        assert 0 < failed < dropped < 32
        assert dropped == 4 * one["reward_failures/dropped_groups"]
        assert failed == one["reward_failures/not_a_number"]
    trained = weights(whole)
    for name, tensor in weights(chunks).items():
        assert torch.equal(tensor, trained[name]), name


def plan(where: Path):
    return json.loads((where / "plan.json").read_text())["actions"]


def test_too_many_failures_stop_the_run_with_the_samples(run):
    where, result = run("--iterations", 2, "--set", "most=0.05", "--set", "policy=drop_sample")
    assert 1 == result.code
    assert result.err.startswith("error[E288]: reward: ")
    assert " of 32 samples of iteration 0 have no reward\n" in result.err
    assert ": returned nan\n" in result.err
    assert "prompt: '" in result.err
    assert "expected     at most the share max_failures=0.05 of them\n" in result.err
    assert not (where / "metrics.jsonl").exists() or not numbers(where)


def test_a_share_without_a_policy_is_refused(run):
    _, result = run("--iterations", 2, "--set", "policy=error", "--set", "most=0")
    assert 3 == result.code
    assert "E280" in result.err


def test_a_reward_whose_needs_are_not_met_starts_nothing():
    def no_jail():
        raise RewardError(Finding(code="E284", what="no jail"))

    async def needy(response: str) -> float:
        return 1.0

    needy.require = no_jail

    @rf.pipeline()
    def pipeline(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        data = rf.data.mix({"sums": rf.data.arithmetic()})
        samples = ops.rollout(actor, ops.prompts(data, batch=4), n=2, max_new_tokens=4)
        reward = ops.reward({"sums": needy}, samples)
        ops.update(actor, samples, ops.advantage("rloo", samples, reward), loss=rf.PolicyLoss())

    with pytest.raises(UsageError) as caught:
        check_rewards(pipeline.trace())
    assert "Nothing was started." == caught.value.summary
    assert caught.value.findings[0].where.path.endswith("test_dropped_runs.py")
