"""States that nodes share: which version a plan lets their readers find, and where they run."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.fields import Edge
from rlflow.graph.graph import Graph
from rlflow.graph.trace import Handle
from rlflow.scheduler.compile import Compiled, compile_plan
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.shared_states import states_are_exact
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.examples import COLOCATE, HYBRID, SPLIT, TWICE
from tests.scheduler.mutants import mutants, with_action
from tests.scheduler.strategies import PLENTY, cluster, exact, graph_of

PLACEMENTS = {"colocate": COLOCATE, "split": SPLIT, "hybrid": HYBRID, "twice": TWICE}


def curriculum(*, inside: bool | None = None) -> Graph:
    """Prompts drawn by pass rates; in a loop, with the tracking inside of it or behind it."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid")
        levels = {str(n): rf.data.arithmetic(digits=n, test_size=20) for n in (1, 2)}
        passes = rf.PassRates("passes", by="level")
        data = rf.data.mix(levels, column="level")

        def attempt() -> tuple[Handle, ...]:
            prompts = ops.prompts(data, batch=8, weights=passes)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
            reward = ops.reward(exact, samples)
            if inside:
                ops.track(passes, samples, reward)
            made = samples, reward
            return made if inside is None else (*made, ops.informative(samples, reward))

        if inside is None:
            batch = attempt()
        else:
            batch = (ops.repeat(attempt, until="informative", groups=8, at_most=3),)
        if not inside:
            ops.track(passes, *batch)
        ref_lp = ops.log_probs(ref, *batch)
        loss = rf.PolicyLoss(kl_coef=0.1, correction=rf.ImportanceSampling())
        ops.update(actor, *batch, ops.advantage("grpo", *batch), ref_lp, loss=loss)

    return graph_of(declare, "curriculum")


def planned(graph: Graph, placement: rf.Placement, **said: object) -> Plan:
    """The plan of a placement, of which what the graph has not is left out."""
    return compiled(graph, placement, **said).plan


def staged(graph: Graph, stage: str, **said: object) -> Plan:
    """What the plan of a split placement is after a pass; distances are in iterations there."""
    return dict(compiled(graph, SPLIT, **said).stages)[stage]


def compiled(graph: Graph, placement: rf.Placement, **said: object) -> Compiled:
    placement = placement.model_copy(update=said)
    known = {"*", *(n.name for n in graph.nodes), *(m.name for m in graph.models)}
    known |= {"actor.rollout", "actor.forward"}
    assign = {key: on for key, on in placement.assign.items() if key in known}
    placement = placement.model_copy(update={"assign": assign})
    return compile_plan(graph, placement, cluster("cpu", 4, PLENTY))


def shared_edges(graph: Graph) -> list[tuple[str, str, int]]:
    return [(e.source, e.target, e.distance) for e in graph.edges if e.kind == "state"]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_prompts_wait_for_the_update_that_their_rollout_waits_for(staleness: int) -> None:
    """prompts(i) <- passes(i - 1 - staleness), as actor.rollout(i) <- actor.update."""
    graph = replace(curriculum(), staleness=staleness)
    assert [("passes", "prompts", 1 + staleness)] == shared_edges(graph)
    plan = planned(graph, SPLIT, staleness=staleness)
    (dep,) = (d for d in plan.action("prompts").after if d.kind == "order")
    ahead = plan.action("prompts").ahead - plan.action("passes").ahead
    assert ("passes", 1 + staleness) == (dep.action, dep.distance + ahead)
    weights = [
        e.distance for e in graph.edges if (e.kind, e.target) == ("weights", "actor.rollout")
    ]
    assert [1 + staleness] == weights


def test_trips_of_a_loop_take_turns() -> None:
    """Two trips of three are shown: each draws after the one before, and tracks so too."""
    plan = planned(curriculum(inside=True), COLOCATE)
    last = [("passes#3", name, 1) for name in ("prompts", "prompts#2", "prompts#3")]
    turns = [
        (f"{name}{one}", f"{name}{other}", distance)
        for name in ("prompts", "passes")
        for one, other, distance in (("", "#2", 0), ("#2", "#3", 0), ("#3", "", 1))
    ]
    assert [*last, *turns] == shared_edges(plan.graph)


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(
    inside=st.sampled_from([None, True, False]),
    name=st.sampled_from(sorted(PLACEMENTS)),
    staleness=st.sampled_from([0, 1, 2]),
    stream=st.sampled_from([1, 2]),
    pause_at=st.sampled_from([None, 4]),
)
def test_every_plan_lets_readers_find_their_version(
    inside: bool | None, name: str, staleness: int, stream: int, pause_at: int | None
) -> None:
    said = {"staleness": staleness, "stream": stream, "pause_at": pause_at if staleness else None}
    plan = planned(curriculum(inside=inside), PLACEMENTS[name], **said)
    assert [] == verify(plan, "notes")


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("inside", [None, True, False])
def test_a_dependency_dropped_or_of_another_distance_is_rejected(
    inside: bool | None, staleness: int
) -> None:
    plan = staged(curriculum(inside=inside), "transfer", staleness=staleness)
    wanted = {(e.source, e.target) for e in plan.graph.edges if e.kind == "state"}
    accepted, tried = [], set()
    for source, target in sorted(wanted):
        action = plan.action(target)
        (dep,) = (d for d in action.after if d.action == source and d.kind == "order")
        others = tuple(d for d in action.after if d != dep)
        dropped = with_action(plan, target, after=others)
        if Facts(plan=dropped).unrolled.past == Facts(plan=plan).unrolled.past:
            continue
        tried.add((source, target))
        wrong = [dropped]
        for distance in (dep.distance - 1, dep.distance + 1, dep.distance + 2):
            again = replace(dep, distance=max(distance, 0))
            if again != dep:
                wrong.append(with_action(plan, target, after=(*others, again)))
        accepted += [(source, target) for mutant in wrong if not verify(mutant, "transfer")]
    assert [] == accepted
    last = "passes#3" if inside else "passes"
    assert (last, "prompts") in tried


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_mutant_of_a_curriculum_is_rejected(staleness: int) -> None:
    plan = planned(curriculum(), SPLIT, staleness=staleness)
    accepted = [name for name, mutant in mutants(plan) if not verify(mutant, "timing")]
    assert [] == accepted


def test_a_curriculum_without_a_write_or_on_two_devices_is_rejected() -> None:
    plan = planned(curriculum(), SPLIT)
    elsewhere = with_action(plan, "prompts", devices=(0,), pool="train")
    assert any("run on [(-1,), (0,)]" in text for text in states_are_exact(Facts(plan=elsewhere)))
    node = replace(plan.graph.node("passes"), params=())
    nodes = (node if n.name == node.name else n for n in plan.graph.nodes)
    unwritten = replace(plan, graph=replace(plan.graph, nodes=tuple(nodes)))
    assert ["nobody writes passes, which prompts reads"] == verify(unwritten, "bind")


def test_writers_out_of_turn_and_too_early_are_named() -> None:
    """In a loop of three trips: track the second before the first, and the first before all."""
    plan = staged(curriculum(inside=True), "transfer")
    second = plan.action("passes#2")
    others = tuple(dep for dep in second.after if dep.action != "passes")
    found = list(states_are_exact(Facts(plan=with_action(plan, "passes#2", after=others))))
    assert "passes#2 may change passes before passes" in found
    found = list(states_are_exact(Facts(plan=with_action(plan, "passes", after=()))))
    assert "passes may change passes before passes#3 of the iteration before" in found
    assert "passes may drop what prompts#2 is to read of passes" in found


@pytest.mark.parametrize(
    ("assign", "refused"),
    [
        ({}, []),
        ({"prompts": rf.on("one"), "passes": rf.on("one")}, []),
        ({"prompts": rf.on("one")}, ["prompts"]),
        ({"passes": rf.on("one")}, ["prompts"]),
        ({"prompts": rf.on("two"), "passes": rf.on("two")}, ["prompts", "passes"]),
    ],
)
def test_who_shares_a_state_runs_in_one_process(
    assign: dict[str, rf.On], refused: list[str]
) -> None:
    placement = rf.Placement(pools={"one": 1, "two": 2}, assign={"*": rf.on("one"), **assign})
    if not refused:
        assert [] == verify(planned(curriculum(), placement), "notes")
        return
    with pytest.raises(PlanError) as caught:
        planned(curriculum(), placement)
    found = caught.value.findings
    assert [("E646", name) for name in refused] == [(f.code, f.what.split("'")[1]) for f in found]


def test_a_graph_without_shared_states_has_no_edges_of_them() -> None:
    def declare() -> None:
        data = rf.data.arithmetic(digits=2)
        ops.metrics(ops.prompts(data, batch=4), name="seen")

    graph = graph_of(declare, "plain")
    assert [] == shared_edges(graph)
    assert all(isinstance(edge, Edge) for edge in graph.edges)
