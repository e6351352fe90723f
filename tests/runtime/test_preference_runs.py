"""Online DPO, a reward model and distillation, end to end on the tiny model."""

from __future__ import annotations

import math

import pytest

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import TINY

pytestmark = pytest.mark.torch

HEAD = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    model: str = "MODEL"
    kind: str = ""
    steps: int = 1


def closeness(response: str, answer: str) -> float:
    if not response.isdigit():
        return -1.0
    return -min(abs(int(response) - int(answer)), 100) / 100


def right(response: str, answer: str) -> float:
    return float(response == answer)


def never(response: str) -> float:
    return 0.0


"""
ONLINE_DPO = """\
@rf.pipeline()
def online_dpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=3, max_new_tokens=8)
    reward = ops.reward(closeness, samples)
    pairs = ops.pair(samples, reward, missing_eos_penalty=1.0)
    ref_lp = ops.log_probs(ref, samples)
    loss = rf.DPOLoss(cfg.kind, sft_coef=0.1)
    ops.update(actor, samples, pairs, ref_lp, loss=loss, mini_batches=cfg.steps)
"""
REWARD_MODEL = """\
@rf.pipeline()
def reward_model(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-4))
    judge = rf.Model("judge", cfg.model, head="value", optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
    reward = ops.reward(closeness, samples)
    pairs = ops.pair(samples, reward)
    scored = ops.scores(judge, samples, field="reward")
    adv = ops.advantage("rloo", samples, scored)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())
    ops.update(judge, samples, reward, pairs, loss=rf.RewardModelLoss(cfg.kind))
"""
DISTILL = """\
@rf.pipeline()
def distill(cfg: Config) -> None:
    student = rf.Model("student", cfg.model, init="random", optimizer=rf.AdamW(lr=1e-3))
    teacher = rf.Model("teacher", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(student, prompts, n=2, max_new_tokens=8)
    scored = ops.log_probs(teacher, samples, field="teacher_log_probs")
    loss = rf.DistillLoss(cfg.kind)
    ops.update(student, samples, scored, loss=loss, mini_batches=cfg.steps)
"""


@pytest.fixture
def run(rlflow, tmp_path, monkeypatch):
    """Three iterations of a pipeline; the metrics of each."""
    monkeypatch.chdir(tmp_path)

    def run(text, *words):
        (tmp_path / "pipeline.py").write_text((HEAD + text).replace("MODEL", str(TINY)))
        options = ("--iterations", 3, "--run-dir", "out", "-q", "--threads", "1")
        result = rlflow("run", "pipeline.py", *words, *options)
        assert 0 == result.code, result.err
        return [line.metrics for line in read_metrics(tmp_path / "out" / "metrics.jsonl")]

    return run


@pytest.mark.rows(1)
@pytest.mark.parametrize(("kind", "steps"), [("sigmoid", 1), ("aot", 2)])
def test_online_dpo(run, kind, steps):
    lines = run(ONLINE_DPO, "--set", f"kind={kind}", "--set", f"steps={steps}")
    assert 3 == len(lines)
    first = lines[0]
    assert 1.0 == pytest.approx(first["pair/pairs"] + first["pair/ties"])
    assert first["pair/pairs"] * 8 == pytest.approx(steps * first["actor.update/pairs"])
    assert first["actor.update/grad_norm"] > 0
    if steps == 1:
        assert math.log(2) == pytest.approx(first["actor.update/preference_loss"], abs=1e-5)
    assert any(line["actor.update/reward_margin"] for line in lines)


@pytest.mark.slow
def test_iterations_of_ties_alone_train_nothing(run):
    same = ONLINE_DPO.replace("closeness, samples", "never, samples")
    same = same.replace(", missing_eos_penalty=1.0", "")
    for line in run(same, "--set", "kind=sigmoid", "--set", "steps=2"):
        assert (0.0, 1.0) == (line["pair/pairs"], line["pair/ties"])
        assert 0.0 == line["actor.update/loss"] == line["actor.update/grad_norm"]


NO_PAIRS = REWARD_MODEL.replace("    pairs = ops.pair(samples, reward)\n", "").replace(
    "reward, pairs", "reward"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kind"), [(REWARD_MODEL, "pairwise"), (NO_PAIRS, "regression"), (NO_PAIRS, "logistic")]
)
def test_a_reward_model_is_trained_and_scores(run, text, kind):
    if kind == "logistic":
        text = text.replace("ops.reward(closeness", "ops.reward(right")
    lines = run(text, "--set", f"kind={kind}")
    assert 0.0 == lines[0]["judge.scores/mean"]
    assert lines[2]["judge.scores/mean"] != 0.0
    assert lines[2]["judge.update/reward_loss"] >= 0
    assert 0 < lines[0]["judge.update/grad_norm"]


def test_a_target_that_is_no_probability_stops_the_run(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (HEAD + NO_PAIRS).replace("cfg.kind", '"logistic"').replace("MODEL", str(TINY))
    (tmp_path / "pipeline.py").write_text(text)
    result = rlflow("run", "pipeline.py", "--iterations", 1, "--run-dir", "out", "-q")
    assert result.code
    assert "error[E271]" in result.err
    assert "between 0 and 1" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "steps"), [("policy_gradient", 2), ("reward", 1), ("supervised", 2)]
)
def test_distillation(run, form, steps):
    lines = run(DISTILL, "--set", f"kind={form}", "--set", f"steps={steps}")
    assert 3 == len(lines)
    assert lines[0]["student.update/teacher_kl"] > 1
    assert lines[0]["student.update/grad_norm"] > 0


def test_a_loss_of_pairs_says_where_pairs_come_from(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (HEAD + ONLINE_DPO).replace("samples, pairs, ref_lp", "samples, ref_lp")
    text = text.replace("cfg.kind", '"sigmoid"').replace("MODEL", str(TINY))
    (tmp_path / "pipeline.py").write_text(text)
    result = rlflow("check", "pipeline.py")
    assert 3 == result.code
    assert "pairs = ops.pair(samples, reward)" in result.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("missing_eos_penalty=1.0", "missing_eos_penalty=-1.0", "missing_eos_penalty > 0"),
        ("ops.pair(samples, reward,", "ops.pair(samples,", "no input 'reward'"),
    ],
)
def test_a_pair_op_that_cannot_be(rlflow, tmp_path, monkeypatch, old, new, message):
    monkeypatch.chdir(tmp_path)
    text = (HEAD + ONLINE_DPO).replace(old, new).replace("cfg.kind", '"sigmoid"')
    (tmp_path / "pipeline.py").write_text(text.replace("MODEL", str(TINY)))
    result = rlflow("check", "pipeline.py")
    assert result.code
    assert message in result.err


def test_a_reward_model_needs_a_value_head(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (HEAD + REWARD_MODEL).replace(', head="value"', "").replace("cfg.kind", '"pairwise"')
    (tmp_path / "pipeline.py").write_text(text.replace("MODEL", str(TINY)))
    result = rlflow("check", "pipeline.py")
    assert 2 == result.err.count("error[E120]")
