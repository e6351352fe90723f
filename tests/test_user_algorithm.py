"""An algorithm from the outside: one file of at most 40 lines, the package untouched."""

from __future__ import annotations

import json

import pytest

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import TINY

pytestmark = pytest.mark.torch

FILE = '''\
"""Best of group against the median: what is above the median is reinforced, the best twice."""

import torch

import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    model: str = "MODEL"
    bonus: float = 2.0


def closeness(response: str, answer: str) -> float:
    if not response.isdigit():
        return -1.0
    return -min(abs(int(response) - int(answer)), 100) / 100


@rf.op(per="group")
def advantages(reward: rf.Row[float], *, bonus: float = 1.0) -> rf.Row[float]:
    above = (reward - reward.median()).clamp(min=0)
    return torch.where(reward == reward.max(), bonus * above, above)


@rf.pipeline()
def best_of_group(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
    reward = ops.reward(closeness, samples)
    better = advantages(samples, reward, bonus=cfg.bonus)
    ops.metrics(better)
    ops.update(actor, samples, better, loss=rf.PolicyLoss("ppo_clip"))
'''


def test_an_algorithm_of_forty_lines_checks_and_runs(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = FILE.replace("MODEL", str(TINY))
    assert len(text.splitlines()) <= 40
    (tmp_path / "best.py").write_text(text)
    assert 0 == rlflow("check", "best.py").code
    result = rlflow("run", "best.py", "--iterations", 3, "--run-dir", "out", "-q")
    assert 0 == result.code, result.err
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [0, 1, 2] == [line.iteration for line in lines]
    for line in lines:
        assert 0 == line.metrics["metrics/advantages_min"]
        assert line.metrics["actor.update/grad_norm"] > 0
    ops = {
        node["op"] for node in json.loads((tmp_path / "out" / "graph.json").read_text())["nodes"]
    }
    assert "advantages" in ops


@pytest.mark.slow
def test_its_option_changes_its_numbers(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best.py").write_text(FILE.replace("MODEL", str(TINY)))
    most = []
    for bonus in (1, 3):
        words = ("--iterations", 1, "--set", f"bonus={bonus}", "--run-dir", f"out{bonus}", "-q")
        assert 0 == rlflow("run", "best.py", *words).code
        (line,) = read_metrics(tmp_path / f"out{bonus}" / "metrics.jsonl")
        most.append(line.metrics["metrics/advantages_max"])
    assert most[1] == pytest.approx(3 * most[0])


def test_an_op_that_raises_is_named_with_its_line(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = FILE.replace("MODEL", str(TINY)).replace("reward.median()", "reward.no_such()")
    (tmp_path / "best.py").write_text(text)
    result = rlflow("run", "best.py", "--iterations", 1, "--run-dir", "out", "-q")
    assert 1 == result.code
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "better = " in row)
    assert result.err.startswith("error[E642]: op advantages (advantages) raised AttributeError: ")
    assert f"\n  best.py:{line}   better = advantages(samples, reward, bonus=cfg.bonus)\n" in (
        result.err
    )


def test_an_op_of_the_wrong_shape_is_named(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = FILE.replace("MODEL", str(TINY)).replace("(reward - reward.median())", "reward[:2]")
    text = text.replace(
        "return torch.where(reward == reward.max(), bonus * above, above)", "return above"
    )
    (tmp_path / "best.py").write_text(text)
    result = rlflow("run", "best.py", "--iterations", 1, "--run-dir", "out", "-q")
    assert 1 == result.code
    assert "error[E643]: op advantages made no field 'advantages' of 4 rows\n" in result.err
    assert (
        "  got          a tensor of shape (2,)\n  expected     a tensor with 4 rows" in result.err
    )
