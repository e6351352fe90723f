"""Plans of episodes: how long rows get, how old the weights of later turns are, where they run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.rules.check import longest_response
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.lengths import Load, assumed
from rlflow.scheduler.devices.cluster import cpu_cluster
from rlflow.scheduler.passes.staleness import stale_rollouts
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.rows import spreads_are_right
from rlflow.scheduler.verify.verify import verify
from tests.conftest import TINY
from tests.scheduler.mutants import mutants, with_action
from tests.scheduler.player import play


class Never(rf.Environment):
    def step(self, state, response):
        return rf.Step("1", False)


def compiled(*, gen=1, engine=None, **options):
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen", engine=engine)}
    placement = rf.Placement(pools={"train": 1, "gen": gen}, assign=assign, **options)

    @rf.pipeline(placements={"split": placement})
    def made(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        limits = {"max_turns": 4, "max_new_tokens": 6, "max_tokens": 48, "expected": 2.5}
        rows = ops.episodes(actor, Never(), prompts, n=2, **limits)
        ops.update(actor, rows, ops.advantage("grpo", rows), loss=rf.PolicyLoss())

    devices = cpu_cluster(1 + gen, threads=1, memory=1.5e9)
    return compile_plan(made.trace(made.config()), placement, devices)


def planned(**options):
    return compiled(**options).plan


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stream": 2}, {"stream": "auto"}, {"staleness": 1}])
def test_later_turns_stay_with_the_replica_that_has_their_rows_in_its_cache(options):
    found = compiled(gen=2, engine="sglang", **options)
    plan = found.plan
    for stage, each in found.stages:
        assert [] == verify(each, stage)
    assert [] == play(plan, seed=3)
    runs = [action for action in plan.actions if action.kind == "run"]
    first = next(action for action in runs if action.node == "actor.rollout")
    turns = [action for action in runs if str(action.node).startswith("episodes.act")]
    assert ("generated", 2) == (first.makes.rule, len(first.makes.parts))
    assert turns
    assert all(first.makes == turn.takes == turn.makes for turn in turns)
    moved = [a for a in plan.actions if a.kind == "transfer" and a.makes == first.makes]
    assert moved
    assert not any("response_tokens" in a.fields for a in moved)
    for name, wrong in mutants(plan):
        if not verify(wrong, "timing"):
            assert [] == play(wrong, seed=5), name


def test_turns_are_costed_in_every_count_of_chunks_that_is_tried():
    (note,) = [n for n in compiled(stream="auto").plan.notes if n.rule == "stream"]
    assert "an iteration" in note.text


def test_without_an_engine_later_turns_are_evened_out():
    plan = planned(gen=2)
    turns = [a for a in plan.actions if a.kind == "run" and a.node == "episodes.act"]
    assert ["balanced"] == [turn.takes.rule for turn in turns]


def test_a_turn_that_leaves_its_rows_replica_is_rejected():
    plan = planned(gen=2, engine="sglang")
    turn = next(a for a in plan.actions if a.kind == "run" and a.node == "episodes.act")
    spread = replace(turn.takes, rule="balanced")
    wrong = with_action(plan, turn.id, takes=spread, makes=spread)
    said = list(spreads_are_right(Facts(plan=wrong)))
    assert any("an engine has cached its rows elsewhere" in text for text in said)
