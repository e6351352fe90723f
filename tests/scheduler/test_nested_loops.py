"""Loops within loops in plans: copies by their trips, gates of each level, chances, wrong plans.

counts:  prompts -> rollout -> [ [ grown -> done ] -> further -> all_done ] -> update
drawn:   [ prompts -> rollout -> [ grown -> done ] -> informative ] -> update
groups:  [ [ prompts -> rollout -> reward -> informative ] -> mixed ] -> update
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.nesting import draw_of, nodes_within, path
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.saved import plan_from_json
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.examples import COLOCATE, compiled_with
from tests.scheduler.looping import (
    THREE,
    TWO,
    begun,
    done,
    fitting,
    grown,
    modes,
    nested,
    nested_loops,
)
from tests.scheduler.mutants import with_action, with_node
from tests.scheduler.player import play
from tests.scheduler.strategies import exact, graph_of, length

KINDS = ("counts", "drawn", "groups")


def unrolled(graph: Graph) -> Graph:
    return dict(compiled_with(graph, fitting(graph, COLOCATE)).stages)["unroll"].graph


def test_every_trip_has_a_loop_of_its_own() -> None:
    graph = unrolled(nested("counts", outer=2, inner=3))
    copies = {path(graph, node): node for node in graph.nodes if node.op.name == "grown"}
    inner = {place: node for place, node in copies.items() if len(place) == 2}

    assert set(product(range(2), range(3))) == set(inner)
    names = ["grown", "grown#1.2", "grown#1.3", "grown#2.1", "grown#2.2", "grown#2.3"]
    assert names == [inner[place].name for place in sorted(inner)]
    assert ["inner", "inner#2"] == [n.name for n in graph.nodes if n.ends_loop and n.loop]
    for (outer, index), node in inner.items():
        end = graph.node(str(node.loop))
        assert ("inner", "inner#2")[outer] == end.name
        assert ((index, 3), (outer, 2), "enough") == (node.trip, end.trip, end.loop)
    assert {"grown#2.1", "grown#2.2", "grown#2.3"} <= {
        n.name for n in nodes_within(graph, "inner#2")
    }
    gates = [n.name for n in graph.nodes if n.is_gate]
    assert gates == [
        "inner.gate",
        "inner.gate#1.2",
        "enough.gate",
        "inner.gate#2.1",
        "inner.gate#2.2",
    ]


def test_what_goes_round_passes_from_trip_to_trip_and_from_loop_to_loop() -> None:
    graph = unrolled(nested("counts", outer=2, inner=3))
    read = {n.name: n.inputs[0].source for n in graph.nodes if n.op.name == "grown"}

    assert read == {
        "grown": "begun",
        "grown#1.2": "grown",
        "grown#1.3": "grown#1.2",
        "further": "inner",
        "grown#2.1": "further",
        "grown#2.2": "grown#2.1",
        "grown#2.3": "grown#2.2",
        "further#2": "inner#2",
    }
    ends = {n.name: sorted(n.sources) for n in graph.nodes if n.ends_loop}
    assert {"grown#2.1", "grown#2.2", "grown#2.3"} <= set(ends["inner#2"])
    assert {"further", "further#2"} <= set(ends["enough"])


def test_rows_that_are_drawn_are_of_their_own_trip() -> None:
    graph = unrolled(nested("groups", outer=2, inner=2))
    for copy in ("", "#1.2", "#2.1", "#2.2"):
        assert f"actor.rollout{copy}" == graph.node(f"informative{copy}").rows_of
    assert ("inner", "inner#2") == (graph.node("mixed").rows_of, graph.node("mixed#2").rows_of)
    drawn = [n for n in graph.nodes if n.op.name == "prompts"]
    draws = [draw_of(graph, n, iteration) for iteration in range(3) for n in drawn]
    assert list(range(12)) == draws


def test_chances_are_those_of_all_loops_around() -> None:
    plan = compiled_with(nested("counts", outer=2, inner=3, expected=(1.5, 2.5)), COLOCATE).plan
    chances = {a.id: a.chance for a in plan.actions if a.node and a.node.startswith("grown")}

    assert [1.0, 1.0, 0.5, 0.5, 0.5, 0.25] == list(chances.values())
    text = plan_text(plan)
    assert "loop: inner takes at most 3 trips in each trip of enough, 2.5 expected" in text
    assert "grown of grown; trip 1 of 3 in trip 1 of 2\n" in text
    assert "trip 3 of 3 in trip 2 of 2, expected in 25% of iterations" in text
    assert "ops.repeat; trip 2 of 2, expected in 50% of iterations" in text


@pytest.mark.parametrize("expected", [1, 2])
def test_seconds_are_those_of_the_trips_that_are_expected(expected: int) -> None:
    graph = nested("groups", outer=2, inner=2, expected=(expected, expected))
    plan = compiled_with(graph, COLOCATE).plan
    ran = [a for a in plan.actions if a.node and a.node.startswith("prompts") and a.chance]
    assert expected**2 == sum(a.chance for a in ran)


def test_one_trip_of_the_inner_loop_waits_for_the_outer_gate() -> None:
    plan = compiled_with(nested("counts", outer=2, inner=1), COLOCATE).plan
    assert "enough.gate" in {dep.action for dep in plan.action("grown#2.1").after}
    assert [] == play(plan, 3)


def test_all_trips_sample_with_the_weights_of_the_first() -> None:
    graph = nested("groups", outer=2, inner=2)
    plan = compiled_with(graph, fitting(graph, THREE).model_copy(update={"staleness": 1})).plan
    names = [n.name for n in plan.graph.nodes if n.op.use == "rollout"]
    assert 4 == len(names)
    assert {1} == {largest_lag(plan)[name] for name in names}
    paused = {"staleness": 2, "pause_at": 4}
    plan = compiled_with(graph, fitting(graph, THREE).model_copy(update=paused)).plan
    lags = {n.name: plan.graph.lag(n) for n in plan.graph.nodes if n.op.use == "rollout"}
    assert ["actor.rollout"] == [name for name, lag in lags.items() if lag == 2]
    assert "actor.rollout#2.2" == plan.graph.node("actor.rollout.resumed#2.2").resumes


@pytest.mark.parametrize("counts", [False, True])
def test_a_loop_that_nobody_reads_is_dropped_with_its_gate_unless_it_has_an_effect(
    counts: bool,
) -> None:
    """What nothing learns from is carried out of neither loop, nor made in them."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))

        def attempt() -> tuple[rf.Handle, ...]:
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)

            def step(state: rf.Handle) -> tuple[rf.Handle, ...]:
                policy = "drop_group" if counts else "error"
                more = ops.reward(length, samples, name="length", on_error=policy)
                after = grown(state).rename(count="grown")
                return after, done(after), more.only("reward").rename(length="reward")

            first = begun(samples).rename(count="begun")
            counted = ops.repeat(step, first, until="done", at_most=2, name="inner")
            reward = ops.reward(exact, samples)
            informative = ops.informative(samples, reward)
            return samples, reward, informative, counted.only("length")

        batch = ops.repeat(attempt, until="informative", groups=8, at_most=2, name="enough")
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())

    plan = compiled_with(graph_of(declare), COLOCATE).plan
    inner = {n.name for n in plan.graph.nodes if n.loop in ("inner", "inner#2") or n.is_gate}
    assert ({"length", "length#2.2", "inner.gate", "inner.gate#2.1"} <= inner) == counts
    assert plan.graph.has_node("inner") == plan.graph.has_node("inner#2") == counts
    assert "enough.gate" in inner
    assert [] == play(plan, 1)


def test_what_is_inside_of_the_inner_loop_is_not_read_from_the_outer() -> None:
    graph = nested("counts")
    (first,) = graph.node("all_done").inputs
    leaked = replace(first, source="grown")
    nodes = tuple(replace(n, inputs=(leaked,)) if n.name == "all_done" else n for n in graph.nodes)
    with pytest.raises(PlanError) as caught:
        compiled_with(replace(graph, nodes=nodes), COLOCATE)
    (finding,) = caught.value.findings
    assert "'all_done' reads 'count' from within loop 'inner'" == finding.what


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_nested_loops_is_read_back_as_it_was_saved(kind: str) -> None:
    saved = dump_plan(compiled_with(nested(kind, model=True), COLOCATE).plan)
    assert saved == dump_plan(plan_from_json(json.loads(saved)))
    assert '"within":{' in saved.replace(" ", "")


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(data=st.data(), graph=nested_loops(), backend=st.sampled_from([None, "ray"]))
def test_plans_of_drawn_nests_verify_and_play(data: st.DataObject, graph: Graph, backend) -> None:
    plan = compiled_with(graph, data.draw(modes(graph)), backend=backend).plan

    assert [] == play(plan, data.draw(st.integers(0, 99)))
    for action in plan.actions:
        if action.trip is None or action.node is None:
            continue
        assert path(plan.graph, plan.graph.node(action.node)) == tuple(
            level.index for level in action.trip.levels
        )
        assert any(level.index for level in action.trip.levels) or action.chance == 1.0


# --- plans that are wrong -------------------------------------------------------------------


def plan_to_break():
    graph = nested("counts", outer=3, inner=2)
    plan = dict(compiled_with(graph, fitting(graph, TWO), backend="ray").stages)["transfer"]
    assert [] == verify(plan, "transfer")
    return plan


def test_a_trip_that_does_not_wait_for_either_gate_is_rejected() -> None:
    plan = plan_to_break()
    for name, gate in (("grown#2.2", "inner.gate#2.1"), ("grown#3.1", "enough.gate#2")):
        early = plan
        own = plan.action(name).trip
        for a in plan.actions:
            if a.trip is not None and own.levels[0] in a.trip.levels:
                after = tuple(dep for dep in a.after if dep.action != gate)
                early = with_action(early, a.id, after=after)
        broken = verify(early, "transfer")
        assert f"{name} may start before {gate} says whether it is to run" in broken


def test_an_action_that_knows_another_trip_around_its_own_is_rejected() -> None:
    plan, survivors = plan_to_break(), []
    for a in plan.actions:
        if a.trip is None or a.trip.within is None:
            continue
        around = a.trip.within
        changes = [
            None,
            replace(around, index=around.index + 1),
            replace(around, of=around.of + 1),
            replace(around, loop="inner"),
            replace(around, gate=True),
            replace(around, goal=around.goal + 1),
            replace(around, within=around),
        ]
        for change in changes:
            broken = with_action(plan, a.id, trip=replace(a.trip, within=change))
            survivors += [] if verify(broken, "transfer") else [(a.id, change)]
    assert [] == survivors


def test_a_copy_that_is_of_another_trip_than_its_name_says_is_rejected() -> None:
    graph = nested("counts", outer=2, inner=2)
    plan = dict(compiled_with(graph, COLOCATE).stages)["unroll"]
    for name, changes in (
        ("grown#2.2", {"loop": "inner"}),
        ("grown#2.2", {"trip": (0, 2)}),
        ("inner#2", {"trip": (0, 2)}),
        ("inner#2", {"loop": None, "trip": None}),
    ):
        broken = verify(with_node(plan, replace(plan.graph.node(name), **changes)), "unroll")
        assert broken, (name, changes)


def test_an_inner_loop_that_reads_another_trip_of_the_outer_is_rejected() -> None:
    graph = nested("counts", outer=2, inner=2)
    plan = dict(compiled_with(graph, COLOCATE).stages)["unroll"]
    end, first = plan.graph.node("inner#2"), plan.graph.node("inner")
    for wrong, right in zip(first.inputs, end.inputs, strict=True):
        inputs = tuple(wrong if bound is right else bound for bound in end.inputs)
        assert verify(with_node(plan, replace(end, inputs=inputs)), "unroll")
