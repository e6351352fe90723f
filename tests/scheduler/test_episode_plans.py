"""Plans of episodes: how long rows get, how old the weights of later turns are, where they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.check import longest_response
from rlflow.scheduler.cluster import cpu_cluster
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.lengths import assumed
from rlflow.scheduler.roofline import Load
from rlflow.scheduler.staleness import largest_lag, stale_rollouts
from tests.conftest import TINY


class Never(rf.Environment):
    def step(self, state, response):
        return rf.Step("1", False)


def planned(**options):
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    placement = rf.Placement(pools={"train": 1, "gen": 1}, assign=assign, **options)

    @rf.pipeline(placements={"split": placement})
    def made(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        limits = {"max_turns": 4, "max_new_tokens": 6, "max_tokens": 48, "expected": 2.5}
        rows = ops.episodes(actor, Never(), prompts, n=2, **limits)
        ops.update(actor, rows, ops.advantage("grpo", rows), loss=rf.PolicyLoss())

    devices = cpu_cluster(2, threads=1, memory=4e9)
    return compile_plan(made.trace(made.config()), placement, devices).plan


def test_rows_are_as_long_as_an_episode_may_get():
    graph = planned().graph
    found = {node.name: longest_response(graph, node) for node in graph.nodes}
    assert 48 == found["actor.update"] == found["episodes.act"] == found["episodes.act#3"]
    assert found["actor.rollout"] is None


def test_what_is_there_so_far_is_the_prompt_of_a_later_turn():
    load = Load(rows=8.0, prompts=4.0, prompt=5, lengths=assumed(48))
    expected = replace(load, prompts=8.0, prompt=47, lengths=assumed(6))
    assert expected == load.later_turn(6)


def test_later_turns_run_where_rollouts_do_and_as_often_as_expected():
    runs = {action.id: action for action in planned().actions if action.kind == "run"}
    turns = [runs[name] for name in ("episodes.act", "episodes.act#2", "episodes.act#3")]
    assert ["actor@gen"] * 3 == [turn.instance for turn in turns]
    assert [1.0, 0.5, 0.0] == [turn.chance for turn in turns]


@pytest.mark.parametrize(
    ("options", "lag", "oldest"),
    [({}, 0, 0), ({"staleness": 2}, 2, 2), ({"staleness": 2, "pause_at": 3}, 1, 2)],
)
def test_later_turns_are_as_old_as_the_first_ones_last_token(options, lag, oldest):
    plan = planned(**options)
    proven = largest_lag(plan)
    assert (oldest, lag) == (proven["actor.rollout"], proven["episodes.act"])
    assert {lag} == {proven[name] for name in proven if name.startswith("episodes.act")}
    expected = {"actor.rollout": oldest, "episodes.turns": oldest} if oldest else {}
    found = stale_rollouts(plan.graph)
    assert expected == {name: found[name] for name in expected}
