"""What a run that goes on may change, and when checkpoints are due: values alone, nothing runs."""

from __future__ import annotations

import json

import pytest

from rlflow.cli.commands import Target, declare
from rlflow.errors import UsageError
from rlflow.runtime.record.changes import graph_changes
from rlflow.runtime.record.saves import SaveRule, best_of, parse_rule
from rlflow.scheduler.plan.durations import clock_text, read_seconds
from tests.conftest import PIPELINES


def graph(*settings: str) -> dict:
    target = Target(pipeline=str(PIPELINES / "grpo_arithmetic.py"), settings=settings)
    return json.loads(json.dumps(declare(target).graph.to_json()))


@pytest.mark.parametrize(
    ("setting", "paths", "fixed"),
    [
        ("lr=1e-3", ["actor.optimizer.lr"], False),
        ("eval_every=7", ["eval.every"], False),
        ("kl_coef=0.5", ["actor.update.loss.kl_coef"], False),
        ("prompts_per_iteration=32", ["prompts.batch"], True),
        ("group_size=4", ["actor.rollout.n"], True),
    ],
)
def test_what_changed_is_named_and_what_has_a_shape_is_fixed(setting, paths, fixed):
    changes = graph_changes(graph("kl_coef=0.02"), graph("kl_coef=0.02", setting))
    assert paths == [change.path for change in changes]
    assert {fixed} == {change.fixed for change in changes}


def test_models_that_are_trained_stay_and_forwards_come_and_go():
    before, now = graph(), graph()
    now["models"] = [model for model in now["models"] if model["name"] != "ref"]
    now["nodes"] = [node for node in now["nodes"] if node["model"] != "ref"]
    assert [("ref", False), ("ref.log_probs", False)] == [
        (change.path, change.fixed) for change in graph_changes(before, now)
    ]
    before["models"][0]["dtype"] = "bfloat16"
    before["nodes"] = [node for node in before["nodes"] if node["name"] != "actor.update"]
    assert {"actor.dtype", "actor.update"} == {
        change.path for change in graph_changes(before, now) if change.fixed
    }


def test_another_optimizer_has_other_states():
    before, now = graph(), graph()
    now["models"][0]["optimizer"] |= {"momentum": 0.95}
    assert [("actor.optimizer.momentum", True)] == [
        (change.path, change.fixed) for change in graph_changes(before, now)
    ]
    for moments, fixed in (("int8", True), ("bfloat16", False)):
        other = graph()
        other["models"][0]["optimizer"] |= {"moments": moments}
        assert [fixed] == [change.fixed for change in graph_changes(before, other)]
    before["models"][0]["optimizer"] |= {"momentum": 0.9}
    assert [False] == [change.fixed for change in graph_changes(before, now)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("50", SaveRule(every=50)),
        ("600s", SaveRule(every=0, seconds=600.0)),
        ("1.5h", SaveRule(every=0, seconds=5400.0)),
        ("10,2m", SaveRule(every=10, seconds=120.0)),
        ("1:30:00", SaveRule(every=0, seconds=5400.0)),
    ],
)
def test_a_rule_is_iterations_a_time_or_both(text, rule):
    assert rule == parse_rule(text, drains=False)
    if rule.every:
        assert rule == parse_rule(text, drains=True)


@pytest.mark.parametrize("text", ["", "0", "x", "5s,3", ",5s", "50,", "0,5s", "-1"])
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(UsageError, match="E312"):
        parse_rule(text, drains=False)


@pytest.mark.parametrize(
    ("text", "seconds", "clock"),
    [
        ("90s", 90.0, "0:01:30"),
        ("1.5d", 129600.0, "1-12:00:00"),
        ("30:00", 1800.0, "0:30:00"),
        ("2-4", 187200.0, "2-04:00:00"),
        ("1-0:30", 88200.0, "1-00:30:00"),
        ("0.5s", 0.5, "0:00:01"),
    ],
)
def test_a_time_is_a_count_of_units_or_a_clock_as_slurm_writes_it(text, seconds, clock):
    assert (seconds, clock) == (read_seconds(text), clock_text(seconds))


@pytest.mark.parametrize("text", ["", "60", "banana", "4:60:00", "-1h", "1:2:3:4", "1h30m", "²h"])
def test_what_is_no_time_is_none(text):
    assert read_seconds(text) is None


def test_a_checkpoint_is_due_when_both_hold():
    rule = SaveRule(every=10, seconds=60.0)
    assert [False, False, True] == [rule.due(10, 59), rule.due(11, 61), rule.due(20, 60)]


def test_the_best_checkpoint_has_the_best_number_known_of_it():
    curve = {0: 0.1, 25: 0.9, 50: 0.5, 75: float("nan")}
    assert 25 == best_of([20, 25, 50], curve, "x")
    assert 20 == best_of([20, 25, 50], curve, "min:x")
    assert 50 == best_of([50, 75], curve, "x")
    assert best_of([50], {}, "x") is None
