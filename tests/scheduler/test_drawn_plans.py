"""What every plan promises, asked of drawn pipelines, placements and memories: one plan for all.

A case is compiled once, and every promise below is asked of its plan: what is costly is the plan.
What the promises mean in numbers that are worked out by hand is in the suites of the passes.
"""

from __future__ import annotations

import itertools
import json
import math
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlflow.errors import PlanError
from rlflow.scheduler.compile import PASSES, Compiled, dump_plan
from rlflow.scheduler.passes.order import periodic_problem
from rlflow.scheduler.periodic.problem import Kernel
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.plan import Action, Chunk, Plan
from rlflow.scheduler.plan.saved import plan_from_json
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.simulate.play import play as played_by_time
from rlflow.scheduler.simulate.simulate import play_plan
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.lies import lies
from tests.scheduler.mutants import mutants
from tests.scheduler.periodic import growth
from tests.scheduler.player import play
from tests.scheduler.strategies import PLENTY, Case, cases, compiled

MOVING = ("run", "transfer")


@settings(max_examples=examples(80))
@given(case=cases(), seed=st.integers(0, 999))
def test_a_case_is_refused_or_its_plan_holds_every_promise(case: Case, seed: int) -> None:
    try:
        found = case.compile()
    except PlanError as refused:
        is_refused_for_a_reason(case, refused)
        return
    plan = found.plan
    assert [name for name, _ in PASSES] == [name for name, _ in found.stages]
    has_the_same_bytes_each_time(case, plan)
    comes_back_whole(plan)
    keeps_every_effect(case, plan)
    reads_weights_of_the_age_that_is_declared(plan)
    is_cut_as_its_ops_allow(case, plan)
    has_a_consistent_kernel_with_the_period_that_is_measured(plan)
    has_the_period_that_it_states_on_a_clock(plan)
    honours_every_dependency_and_lane_on_a_clock(plan, Random(seed))
    assert [] == play(plan, seed)


@pytest.mark.slow
@settings(max_examples=examples(8))
@given(found=compiled(), random=st.randoms(use_true_random=False))
def test_mutants_and_lies_that_verify_play_without_a_violation(
    found: Compiled, random: Random
) -> None:
    """Of all that is wrong with one plan a few are drawn: to make them all is what costs."""
    wrong = random.sample(list(mutants(found.plan)), 3)
    wrong += [(what, lie()) for what, lie in random.sample(list(lies(found.plan)), 3)]
    for name, plan in wrong:
        if not verify(plan, "timing"):
            for seed in range(6):
                assert [] == play(plan, seed), name


def is_refused_for_a_reason(case: Case, refused: PlanError) -> None:
    """Memory is one only where one action alone does not fit."""
    assert refused.findings
    if "E401" in {finding.code for finding in refused.findings}:
        assert largest_need(case) > case.devices.kind.memory


def largest_need(case: Case) -> int:
    """The most bytes that one action needs on a device, asked of a plan with plenty.

    Of what it does not need there is what stays although it sleeps: all of an engine, where that
    goes on from piece to piece of a rollout.
    """
    plan = case.with_memory(PLENTY).compile().plan
    return max(
        (a.cost.transient or 0)
        + sum(
            (part.size or 0) if part.name in a.needs else part.residual
            for part in plan.parts
            if device in part.devices
        )
        for a in plan.actions
        for device in a.devices
    )


def has_the_same_bytes_each_time(case: Case, plan: Plan) -> None:
    again = case.compile().plan
    assert plan_text(plan) == plan_text(again)
    assert dump_plan(plan) == dump_plan(again)


def comes_back_whole(plan: Plan) -> None:
    found = plan_from_json(json.loads(dump_plan(plan)))
    assert dump_plan(plan) == dump_plan(found)
    read = (found.instances, found.parts, found.actions)
    assert (plan.instances, plan.parts, plan.actions) == read


def keeps_every_effect(case: Case, plan: Plan) -> None:
    """What else is left out is said."""
    kept = {node.name for node in plan.graph.nodes}
    assert {node.name for node in case.graph.nodes if node.op.effect == "effectful"} <= kept
    gone = [node.name for node in case.graph.nodes if node.name not in kept]
    noted = " ".join(note.text for note in plan.notes)
    assert all(name in noted for name in gone)


def reads_weights_of_the_age_that_is_declared(plan: Plan) -> None:
    graph = plan.graph
    readers = [node for model in graph.models for node in graph.readers(model.name)]
    learning = [node for node in readers if graph.updates(str(node.model))]
    found = largest_lag(plan)
    assert {node.name: graph.lag(node) for node in learning} == found
    for node in learning:
        if node.resumes is not None:
            assert found[node.resumes] - 1 == found[node.name]


def runs(plan: Plan, node: str) -> list[Action]:
    return [a for a in plan.actions if a.kind == "run" and a.node == node]


def is_cut_as_its_ops_allow(case: Case, plan: Plan) -> None:
    """The rules of pass `stream`, of nodes and not of actions."""
    count = case.placement.stream
    own_steps = any(
        dict(node.params).get("shuffle") is False
        for node in plan.graph.nodes
        if node.op.use == "train" and "background" not in dict(node.params)
    )
    for node in plan.graph.nodes:
        found = runs(plan, node.name)
        if found[0].chunk is None:
            assert 1 == len(found)
            continue
        if "background" in dict(node.params):
            assert dict(node.params)["mini_batches"] == len(found)
            continue
        by = found[0].chunk.by
        assert [Chunk(index=i, count=count, by=by) for i in range(count)] == sorted(
            (a.chunk for a in found), key=lambda chunk: chunk.index
        )
        assert node.op.per == "row" or by == "prompts"
        if found[0].begins:
            own_rule = found[0].takes.rule == "long_first"
            together = own_rule or "ignore_eos" in dict(node.params)
            assert own_steps or (by == "prompts") is together
        assert 1 == node.every
        if node.op.use == "train":
            said = dict(node.params)
            assert (1, False) == (said["epochs"], said["shuffle"])
            assert said["mini_batches"] % count == 0
            continue
        assert node.op.per != "batch"
        assert "pure" == node.op.effect
        cut_sources = [runs(plan, source)[0].chunk is not None for source in node.sources]
        assert all(cut_sources) or node.op.rows == "expand"


def has_a_consistent_kernel_with_the_period_that_is_measured(plan: Plan) -> None:
    place = {a.id: index for index, a in enumerate(plan.actions)}
    for one in plan.actions:
        for dep in one.after:
            assert dep.distance > 0 or (dep.distance == 0 and place[dep.action] < place[one.id])
    lanes: dict[tuple[int, str], list[str]] = {}
    for one in plan.actions:
        for device in one.devices:
            lanes.setdefault((device, one.lane), []).append(one.id)
    for queue in lanes.values():
        for before, after in itertools.pairwise(queue):
            assert any(d.action == before and d.distance == 0 for d in plan.action(after).after)
        assert any(d.action == queue[-1] and d.distance <= 1 for d in plan.action(queue[0]).after)
    if plan.timing is None:
        return
    problem = periodic_problem(plan, ("data", "weights", "order", "device"))
    turns = Kernel(order=tuple(range(len(place))), ahead=(0,) * len(place))
    found = plan.timing
    assert found.period == pytest.approx(growth(problem, turns), rel=2e-3, abs=1e-9)
    assert max(found.resource_bound, found.recurrence_bound) <= found.period * (1 + 1e-9)
    assert tuple(place) == tuple(name for name, _ in found.slack)
    slack = dict(found.slack)
    assert all(0 <= room < math.inf for room in slack.values())
    assert all(slack[name] <= 1e-6 * found.period for name in found.critical)


def has_the_period_that_it_states_on_a_clock(plan: Plan) -> None:
    """Actions that are due every n-th time count an nth in what a plan states: a lower bound."""
    found = play_plan(plan)
    waited = [use.busy + sum(share for _, share in use.waits) for use in found.uses]
    assert waited == pytest.approx([1.0] * len(waited), abs=1e-6) or not found.window[1]
    if plan.timing is None:
        return
    least = plan.timing.period * (1 - 1e-6)
    assert found.period >= least or not found.exact
    if all(action.every == 1 for action in plan.actions) and found.exact:
        assert plan.timing.period == pytest.approx(found.period, rel=1e-6)


def honours_every_dependency_and_lane_on_a_clock(plan: Plan, random: Random) -> None:
    spans = played_by_time(
        plan, 5, seconds=lambda action, i: random.choice([0.0, 0.5, 1.0, 3.0]), barrier=3
    )
    taken: dict[tuple[int, str], float] = {}
    for span in spans:
        assert span.end - span.start == span.seconds
        for device in span.action.devices:
            assert taken.get((device, span.action.lane), 0.0) <= span.start
            taken[device, span.action.lane] = span.end
    for segment in (range(3), range(3, 5)):
        own = [s for s in spans if s.action.kind in MOVING and s.iteration in segment]
        ends = {(s.action.id, s.turn): s.end for s in own}
        for span in own:
            for dep in span.action.after:
                assert ends.get((dep.action, span.turn - dep.distance), 0.0) <= span.start
        assert max((s.end for s in own), default=0.0) <= min(
            (s.start for s in spans if s.action.kind in MOVING and s.iteration >= segment.stop),
            default=float("inf"),
        )
