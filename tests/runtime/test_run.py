"""What a run leaves behind: metrics, spans, and the same bits whatever the memory."""

from __future__ import annotations

import json

import pytest

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK
from tests.runtime.whole_runs import GRPO, Declared, kinds, numbers, plan_of, state

pytestmark = pytest.mark.torch

SFT = Declared(
    str(PIPELINES / "sft_arithmetic.py"), ("--set", "batch=8", "--iterations", 8, *QUICK)
)


@pytest.mark.slow
def test_memory_pressure_does_not_change_a_bit(train):
    what = GRPO.said("--set", "kl_coef=0.05")
    wide, tight = train(what, "colocate"), train(what, "colocate", "--devices", "cpu:1@39MB")
    assert not {"sleep", "wake"} & kinds(wide)
    assert {"sleep", "wake"} <= kinds(tight)
    assert state(wide) == state(tight)


def test_a_reshard_is_where_weights_have_to_move_and_nowhere_else(train):
    assert "reshard" in kinds(train(GRPO, "split"))
    assert "reshard" not in kinds(train(GRPO, "colocate"))


@pytest.mark.slow
def test_another_seed_changes_the_numbers(train):
    one, two = numbers(train(GRPO, "split")), numbers(train(GRPO, "split", "--set", "seed=1"))
    assert one[0] != two[0]


def test_metrics_have_one_line_an_iteration_and_one_for_the_end(train):
    run = train(GRPO, "colocate", "--set", "eval_every=3", "--iterations", 4)
    lines = read_metrics(run / "metrics.jsonl")
    assert [0, 1, 2, 3, 4] == [line.iteration for line in lines]
    assert [0, 3, 4] == [line.iteration for line in lines if "eval/reward" in line.metrics]
    assert {"eval"} == {name.partition("/")[0] for name in lines[-1].metrics}


def spans_of(run):
    lines = (run / "spans" / "main.jsonl").read_text().splitlines()
    return [span for span in map(json.loads, lines) if "action" in span]


def test_every_action_leaves_a_span(train):
    run = train(GRPO, "split")
    spans = [(line["action"], line["iteration"]) for line in spans_of(run)]
    for action in plan_of(run)["actions"]:
        name = action["id"]
        expected = {i for i in (0, 1, 2) if i % action["every"] == action["phase"]}
        expected |= {3} if action["closing"] else set()
        assert expected == {iteration for span, iteration in spans if span == name}, name
    assert len(spans) == len(set(spans))


@pytest.mark.slow
def test_what_is_in_flight_is_bounded(train):
    """Prompts wait for nothing, and ran fifteen iterations ahead of a slow update."""
    spans = {(each["action"], each["iteration"]): each for each in spans_of(train(SFT, "colocate"))}
    for iteration in range(2, 8):
        began = spans["prompts", iteration]["start"]
        assert began >= spans["student.update", iteration - 2]["end"]
