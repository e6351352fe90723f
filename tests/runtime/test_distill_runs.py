"""A student learns whole distributions of a teacher, and sums over the vocabulary, end to end."""

from __future__ import annotations

import pytest

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import TINY

pytestmark = pytest.mark.torch

HEAD = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    model: str = "MODEL"
    form: str = "jsd"
    top_k: int = 8
    steps: int = 1


def right(response: str, answer: str) -> float:
    return float(response == answer)


PLACEMENTS = {
    "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
    "split": rf.Placement(
        pools={"a": 1, "b": 1},
        assign={"*": rf.on("a"), "frozen": rf.on("b")},
    ),
    "fsdp": rf.Placement(
        pools={"a": 2, "b": 1},
        assign={"*": rf.on("a", fsdp=2), "policy.rollout": rf.on("b"), "frozen": rf.on("b")},
    ),
}


"""
DISTILL = """\
@rf.pipeline(placements=PLACEMENTS)
def distill(cfg: Config) -> None:
    student = rf.Model("policy", cfg.model, init="random", optimizer=rf.AdamW(lr=3e-3))
    teacher = rf.Model("frozen", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(student, prompts, n=1, max_new_tokens=6)
    scored = ops.log_probs(teacher, samples, top_k=cfg.top_k)
    ops.update(student, samples, scored, loss=rf.DistillLoss(cfg.form), mini_batches=cfg.steps)
"""
FULL = """\
@rf.pipeline(placements=PLACEMENTS)
def full(cfg: Config) -> None:
    actor = rf.Model("policy", cfg.model, optimizer=rf.AdamW(lr=1e-4))
    ref = rf.Model("frozen", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    reward = ops.reward(right, samples)
    old = ops.log_probs(actor, samples, sum_pi_squared=True)
    ref_lp = ops.log_probs(ref, samples, top_k=cfg.top_k)
    adv = ops.advantage("otb", samples, reward, old)
    loss = rf.PolicyLoss(kl_coef=0.1, kl="full")
    ops.update(actor, samples, adv, old, ref_lp, loss=loss, mini_batches=2)
"""


@pytest.fixture
def run(rlflow, tmp_path, monkeypatch):
    """Some iterations of a pipeline; the metrics of each."""
    monkeypatch.chdir(tmp_path)

    def run(text, iterations, *words, into="out"):
        (tmp_path / "pipeline.py").write_text((HEAD + text).replace("MODEL", str(TINY)))
        options = ("--iterations", iterations, "--run-dir", into, "-q", "--threads", "1")
        result = rlflow("run", "pipeline.py", *words, *options)
        assert 0 == result.code, result.err
        return [line.metrics for line in read_metrics(tmp_path / into / "metrics.jsonl")]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("form", "steps"), [("jsd", 1), ("forward_kl", 2), ("reverse_kl", 1)])
def test_the_student_comes_closer_to_the_teacher(run, form, steps):
    words = ("--placement", "colocate", "--set", f"form={form}", "--set", f"steps={steps}")
    lines = run(DISTILL, 12, *words)
    kl = [line["policy.update/teacher_kl"] for line in lines]
    assert sum(kl[-3:]) / 3 < 0.9 * sum(kl[:3]) / 3, kl
    assert 0.5 < lines[0]["policy.update/top_mass"] <= 1
    assert all(line["policy.update/distill_loss"] > 0 for line in lines)


@pytest.mark.slow
def test_sums_over_the_vocabulary_wherever_they_are_computed(run):
    words = ("--set", "top_k=51", "--placement")
    here, there = (run(FULL, 2, *words, where, into=where) for where in ("colocate", "split"))
    assert here[1]["policy.update/kl"] > 0
    for mine, theirs in zip(here, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_a_full_kl_of_some_tokens_is_refused(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text((HEAD + FULL).replace("MODEL", str(TINY)))
    result = rlflow("plan", "pipeline.py", "--placement", "colocate")
    assert 4 == result.code
    assert "error[E637]" in result.err
    assert "top_k=51" in result.err


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("placement", [pytest.param("split", marks=pytest.mark.extra), "fsdp"])
def test_likeliest_tokens_go_from_rank_to_rank(run, placement):
    here = run(DISTILL, 12, "--placement", "colocate", into="here")
    words = ("--placement", placement, "--backend", "ray")
    there = run(DISTILL, 12, *words, into="there")
    kl = [line["policy.update/teacher_kl"] for line in there]
    assert sum(kl[-3:]) < 0.9 * sum(kl[:3])
    name = "policy.update/distill_loss"
    assert here[0][name] == pytest.approx(there[0][name], rel=1e-4)
