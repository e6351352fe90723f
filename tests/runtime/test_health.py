"""Signs that nothing is learned: each rule, when it speaks, and what a strict run does."""

from __future__ import annotations

import math
import re

import pytest

from rlflow.runtime.record.health import RULES, Health, review
from tests.conftest import ROOT

FINE = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "actor.rollout/finished": 0.9,
    "actor.rollout/length_max": 8.0,
    "actor.rollout/entropy": 0.4,
    "advantage/degenerate": 0.6,
    "actor.update/grad_norm": 1.0,
    "actor.update/skipped": 0.0,
    "actor.update/kl": 0.1,
    "actor.update/approx_kl": -0.01,
    "actor.update/rollout_gap": 0.01,
    "pair/pairs": 1.0,
    "episodes/reward": 0.3,
    "episodes/turns": 2.0,
}
BAD = {
    "not finite": {"actor.update/loss": math.nan},
    "skipped steps": {"actor.update/skipped": 1.0},
    "equal groups": {"advantage/degenerate": 1.0},
    "no pairs": {"pair/pairs": 0.0},
    "no gradient": {"actor.update/grad_norm": 0.0},
    "all truncated": {"actor.rollout/finished": 0.0},
    "entropy collapsed": {"actor.rollout/entropy": 0.001},
    "constant reward": {"reward/std": 0.0},
    "constant return": {"episodes/reward": 0.0},
    "far from the reference": {"actor.update/kl": 2.0},
    "long steps": {"actor.update/approx_kl": -0.7},
    "rollout gap": {"actor.update/rollout_gap": 0.3},
}


def run(*parts):
    """Lines of iterations: so many of each of the metrics, the mean return never the same."""
    metrics = [
        {**FINE, "episodes/reward": 0.1 * (n + 1), **m} for count, m in parts for n in range(count)
    ]
    return list(enumerate(metrics))


def test_every_rule_has_a_case_here_and_a_line_in_the_docs():
    assert [rule.name for rule in RULES] == list(BAD)
    page = (ROOT / "docs" / "running.md").read_text()
    told = dict(re.findall(r"^\| ([a-z ]+) \| .*: (\d+)(?:;.*)? \|$", page, flags=re.MULTILINE))
    assert {rule.name: str(rule.lasts) for rule in RULES} == told


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_speaks_once_and_after_as_many_iterations_in_a_row(rule):
    bad = BAD[rule.name]
    assert [] == review(run((rule.lasts - 1, bad), (3, {}), (rule.lasts - 1, bad)))
    (sign,) = review(run((3, {}), (2 * rule.lasts, bad), (3, {}), (2 * rule.lasts, bad)))
    assert (rule.name, 2 + rule.lasts) == (sign.rule.name, sign.iteration)
    assert bad == sign.values
    assert sign.line().startswith(f"{rule.name}, iteration {2 + rule.lasts}: ")
    assert f"; try {rule.tries}" in sign.line()


def test_metrics_of_one_rule_are_one_sign():
    bad = {f"{name}.update/loss": math.inf for name in ("alice", "bob")}
    (sign,) = review([(4, bad)])
    assert "alice.update/loss inf and 1 more" == sign.where


def test_numbers_that_are_logged_rarely_count_when_they_are():
    lines = [(n, {"pair/pairs": 0.0} if n % 5 == 0 else {}) for n in range(50)]
    assert [45] == [sign.iteration for sign in review(lines)]


def test_responses_of_one_length_are_not_truncated():
    lines = run((20, BAD["all truncated"]))
    assert [] == review(lines, fixed={"actor.rollout"})
    assert 1 == len(review(lines, fixed={"other.rollout"}))


@pytest.mark.parametrize(
    "metrics",
    [
        {"eval/finished": 0.0, "eval/reward": 0.0},
        {"actor.update/lr": 0.0, "advantage/kl": 0.0, "greedy/finished": 0.0},
        {"drafter.update/skipped": 0.0, "advantage/std": 0.0},
    ],
)
def test_numbers_of_the_same_name_of_other_nodes_are_left_alone(metrics):
    assert [] == review(run((30, metrics)))


def test_what_was_told_is_told_again_when_asked():
    health = Health()
    bad = run((20, BAD["constant reward"]))
    first = [sign for line in bad for sign in health.see(*line)]
    assert 1 == len(first)
    assert [] == health.see(20, bad[0][1])
    health.forget()
    assert 1 == len(health.see(21, bad[0][1]))


PIPELINE = """
import rlflow as rf
from rlflow import ops

def same(response: str) -> float:
    return 0.5

@rf.pipeline()
def flat(cfg: rf.Config) -> None:
    actor = rf.Model("actor", {tiny!r}, optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    adv = ops.advantage("grpo", samples, ops.reward(same, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_says_what_it_sees_and_a_strict_one_ends_by_it(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = str(ROOT / "pipelines" / "assets" / "arith-tiny")
    (tmp_path / "flat.py").write_text(PIPELINE.format(tiny=tiny))
    words = ("run", "flat.py", "--iterations", 12, "--threads", 1, "--save-every", 4)
    said = rlflow(*words, "--run-dir", "warned", "-q")
    assert 0 == said.code, said.err
    for name in ("equal groups", "no gradient", "constant reward"):
        assert 1 == said.err.count(f"warning: {name}, iteration 9: ")
    page = rlflow("report", "warned")
    assert 0 == page.code, page.err
    assert 3 == (tmp_path / "warned" / "report.html").read_text().count('<p class="sign">')

    ended = rlflow(*words, "--run-dir", "ended", "-q", "--strict")
    assert 5 == ended.code
    assert "error[E783]: equal groups" in ended.err
    assert "continue with: rlflow run flat.py" in ended.err
    assert "--strict" in ended.err
    assert "iteration-000008" == (tmp_path / "ended" / "checkpoints" / "LATEST").read_text().strip()
    whole = rlflow("run", "flat.py", "--threads", 1, "--save-every", 4, "-q", "--resume", "ended")
    assert 0 == whole.code, whole.err
    same = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("warned", "ended")]
    assert same[0] == same[1]
