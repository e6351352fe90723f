"""Periods of plans whose iterations differ: no means where an iteration waits for the longest."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.scheduler.periodic.differing import period_of_turns
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.simulate.simulate import play_plan
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import compiled_with
from tests.scheduler.strategies import exact, graph_of

RING = [(0, 0, 1), (1, 1, 1), (0, 1, 0), (1, 0, 2)]


def flowing(epochs: int, staleness: int = 3) -> Plan:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=1000)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss(), epochs=epochs)

    tail = rf.Lengths(response=rf.Length(mean=125, p95=400, max=1000))
    graph = replace(graph_of(declare, "long"), lengths=tail)
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen")}
    pools = {"train": 1, "gen": 1}
    place = rf.Placement(pools=pools, assign=assign, staleness=staleness, continuous=True)
    return compiled_with(graph, place, kind="h100").plan


def test_turns_that_are_alike_take_the_slowest_cycle() -> None:
    assert 3.0 == pytest.approx(period_of_turns(lambda task, _: (3.0, 2.0)[task], RING, 2, 9))


def test_a_mean_of_maxima_is_more_than_the_maximum_of_means() -> None:
    """0 and 4 beside 2 in lockstep: each turn takes 2 or 4, not 2."""
    lockstep = [(0, 0, 1), (1, 1, 1), (0, 1, 1), (1, 0, 1)]
    found = period_of_turns(lambda task, turn: 2.0 if task else 4.0 * (turn % 2), lockstep, 2, 31)
    assert found == pytest.approx(fmean([2, 4]), rel=0.05)


@pytest.mark.parametrize("epochs", [1, 100])
def test_a_plan_whose_iterations_differ_says_what_simulate_plays(epochs: int) -> None:
    plan = flowing(epochs)
    timing = plan.timing
    assert timing is not None
    assert timing.period <= timing.played == timing.seconds
    assert timing.seconds == pytest.approx(play_plan(plan).period, rel=0.01)
    if epochs > 1:  # About as long as the rollout: some iterations wait for it, some for that.
        assert timing.played > 1.05 * timing.period
    assert "iterations differ; of their means" in plan_text(plan)


def test_a_period_that_is_no_longer_than_its_means_is_refused() -> None:
    plan = flowing(1)
    assert plan.timing is not None
    wrong = replace(plan, timing=replace(plan.timing, played=0.9 * plan.timing.period))
    assert any("are played" in told for told in verify(wrong, stage="notes"))
