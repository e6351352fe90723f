"""Pass `unroll`: trips, what they read, how they are costed, and plans of loops that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.passes.staleness import stale_rollouts
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.examples import COLOCATE, SPLIT, compiled_with
from tests.scheduler.looping import THREE, TWO, counting, dapo, fitting, loops, modes
from tests.scheduler.mutants import with_action, with_node
from tests.scheduler.player import play
from tests.scheduler.strategies import exact, graph_of

TRIP = ["prompts", "actor.rollout", "reward", "informative", "ref.log_probs", "enough.gate"]


def unrolled(graph: Graph, placement: rf.Placement = SPLIT) -> Graph:
    compiled = compiled_with(graph, fitting(graph, placement))
    return dict(compiled.stages)["unroll"].graph


def sources(node: Node) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for bound in node.inputs:
        found.setdefault(bound.name, []).append(bound.source)
    return found


def runs(plan: Plan, node: str) -> Action:
    (found,) = (a for a in plan.actions if a.kind == "run" and a.node == node)
    return found


# --- the graph ------------------------------------------------------------------------------


def test_a_loop_becomes_as_many_trips_as_it_may_take() -> None:
    graph = unrolled(dapo(at_most=3))
    names = [node.name for node in graph.nodes]
    later = [f"{name}#{trip}" for trip in (2, 3) for name in TRIP]

    assert [*TRIP, *later[:-1], "enough", "advantage", "actor.update"] == names
    for number, trip in enumerate((TRIP, later[:6], later[6:-1])):
        assert {(number, 3)} == {graph.node(name).trip for name in trip}
        assert {"enough"} == {graph.node(name).loop for name in trip}
    assert {None} == {graph.node(n).trip for n in ("enough", "advantage", "actor.update")}


def test_a_trip_reads_what_it_has_made_itself() -> None:
    graph = unrolled(dapo(at_most=3))
    for end in ("", "#2", "#3"):
        assert {f"prompts{end}"} == set(graph.node(f"actor.rollout{end}").sources)
        assert {f"actor.rollout{end}"} == set(graph.node(f"reward{end}").sources)
        assert f"actor.rollout{end}" == graph.node(f"reward{end}").rows_of
    assert {"informative#2", "actor.rollout#2"} == set(graph.node("enough.gate#2").sources)


def test_the_end_reads_every_trip_in_their_order() -> None:
    end = unrolled(dapo(at_most=3)).node("enough")
    read = sources(end)

    assert ["reward", "reward#2", "reward#3"] == read["reward"]
    assert ["actor.rollout", "actor.rollout#2", "actor.rollout#3"] == read["response_tokens"]
    assert {3} == {len(found) for found in read.values()}


def test_fields_that_nobody_reads_are_left_out() -> None:
    """Learning reads tokens, masks and reference log-probs; the loop itself what it ends by."""
    end = unrolled(dapo(at_most=2)).node("enough")

    wanted = {"prompt_tokens", "response_tokens", "response_mask", "ref_log_probs"}
    wanted |= {"rollout_log_probs", "informative", "group", "reward"}
    assert wanted == set(sources(end))
    assert set(sources(end)) == {wanted.name for wanted in end.op.inputs}


def test_ops_of_a_body_that_nobody_reads_are_not_repeated() -> None:
    compiled = compiled_with(dapo(unread=True, reference=False), COLOCATE)
    plan = compiled.plan

    assert "unread" in dict(compiled.stages)["stamp"].graph.node("enough").sources
    assert not any(node.name.startswith("unread") for node in plan.graph.nodes)
    assert any("unread is dropped: nobody reads" in note.text for note in plan.notes)


def test_without_trips_to_choose_from_there_is_no_gate() -> None:
    graph = unrolled(dapo(at_most=1))

    assert "enough.gate" not in {node.name for node in graph.nodes}
    assert (0, 1) == graph.node("reward").trip
    assert {"reward", "actor.rollout", "informative", "ref.log_probs"} == set(
        graph.node("enough").sources
    )


def test_a_state_goes_from_trip_to_trip() -> None:
    graph = unrolled(counting(at_most=3))

    assert ["begun"] == sources(graph.node("grown"))["count"]
    assert ["grown"] == sources(graph.node("grown#2"))["count"]
    assert ["grown#2"] == sources(graph.node("grown#3"))["count"]
    assert ["grown#2"] == sources(graph.node("done#2"))["count"]
    assert ["grown", "grown#2", "grown#3"] == sources(graph.node("repeat"))["count"]
    assert {"grown"} == {b.field.name for b in graph.node("grown#2").inputs}
    assert "carried" not in dict(graph.node("repeat").params)


def test_what_is_no_state_is_read_where_it_was_made() -> None:
    graph = unrolled(counting(at_most=2, model=True), THREE)

    for name in ("ref.log_probs", "ref.log_probs#2"):
        assert {"actor.rollout"} == set(graph.node(name).sources)
        assert "actor.rollout" == graph.node(name).rows_of


def test_a_plan_without_loops_stays_as_it_is() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        ops.update(actor, ops.tokenize(actor, prompts), loss=rf.SFTLoss())

    stages = dict(compiled_with(graph_of(declare), COLOCATE).stages)
    assert stages["rewrite"] == stages["unroll"]


def test_what_is_inside_of_a_loop_is_not_read_from_outside() -> None:
    def declare() -> None:
        kept = []
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))

        def attempt() -> tuple[rf.Handle, ...]:
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
            reward = ops.reward(exact, samples)
            kept.append(reward)
            return samples, reward, ops.informative(samples, reward)

        batch = ops.repeat(attempt, until="informative", groups=8, at_most=2)
        ops.metrics(kept[0], name="all")
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())

    with pytest.raises(PlanError) as caught:
        compiled_with(graph_of(declare), COLOCATE)
    (finding,) = caught.value.findings
    assert "E127" == finding.code
    assert "'all' reads 'reward' from within loop 'repeat'" == finding.what
    assert "reward of reward, which each trip makes anew" == finding.got


# --- actions --------------------------------------------------------------------------------


def test_actions_know_their_trip_and_its_goal() -> None:
    plan = compiled_with(dapo(at_most=3), SPLIT).plan

    for action in plan.actions:
        base, _, number = str(action.node).partition("#")
        if base not in TRIP:
            assert action.trip is None
            continue
        trip = action.trip
        assert trip is not None
        assert ("enough", int(number or 1) - 1, 3, 8.0) == (
            trip.loop,
            trip.index,
            trip.of,
            trip.goal,
        )
        assert (base == "enough.gate") == trip.gate
    assert 2 == sum(a.trip is not None and a.trip.gate for a in plan.actions)


def test_transfers_of_a_trip_are_left_out_with_it() -> None:
    graph = dapo(at_most=2)
    plan = compiled_with(graph, fitting(graph, TWO), backend="ray").plan
    moved = [a for a in plan.actions if a.kind == "transfer"]
    trips = {a.node: None if a.trip is None else a.trip.index for a in moved}

    assert 0 == trips["actor.rollout"]
    assert 1 == trips["actor.rollout#2"]
    assert not any(a.trip is not None and a.trip.gate for a in moved)
    assert all(a.chance == runs(plan, str(a.node)).chance for a in moved)


@pytest.mark.parametrize(
    ("expected", "chances"),
    [
        (None, [1.0, 0.5, 0.0, 0.0]),
        (1.0, [1.0, 0.0, 0.0, 0.0]),
        (2.25, [1.0, 1.0, 0.25, 0.0]),
        (4.0, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_seconds_are_weighed_by_the_trips_that_are_expected(
    expected: float | None, chances: list[float]
) -> None:
    plan = compiled_with(dapo(at_most=4, expected=expected), SPLIT).plan
    names = ["actor.rollout", *(f"actor.rollout#{trip}" for trip in (2, 3, 4))]
    found = [runs(plan, name) for name in names]

    assert chances == [a.chance for a in found]
    assert 1 == len({a.cost.seconds for a in found})
    assert 1.0 == plan.action("actor.update").chance


def test_more_trips_make_an_iteration_longer_by_what_they_take() -> None:
    """On one device; one trip more adds its rollout and reward, and nothing else."""
    seconds = {}
    for expected in (1, 2, 3):
        plan = compiled_with(dapo(at_most=3, expected=expected, reference=False), COLOCATE).plan
        seconds[expected] = plan.timing.period if plan.timing else 0.0
    trip = sum(
        a.cost.seconds or 0.0
        for a in plan.actions
        if a.trip is not None and a.trip.index == 1
    )  # fmt: skip
    assert seconds[1] < seconds[2] < seconds[3]
    assert pytest.approx(trip, rel=0.05) == seconds[2] - seconds[1]


def test_a_trip_that_is_never_expected_still_has_its_place_and_memory() -> None:
    plan = compiled_with(dapo(at_most=2, expected=1), SPLIT).plan
    first, second = runs(plan, "actor.rollout"), runs(plan, "actor.rollout#2")

    assert first.cost == second.cost
    assert second.cost.transient
    assert second.needs == first.needs
    assert "enough.gate" in {dep.action for dep in runs(plan, "prompts#2").after}


def test_trips_that_nobody_named_are_called_assumed() -> None:
    text = plan_text(compiled_with(dapo(at_most=3, expected=None), SPLIT).plan)
    assert "loop: enough takes at most 3 trips, 1.5 assumed; " in text


def test_a_plan_says_which_trips_it_expects() -> None:
    text = plan_text(compiled_with(dapo(at_most=3, expected=2.25), SPLIT).plan)

    assert "loop: enough takes at most 3 trips, 2.25 expected; a trip is left out where" in text
    assert "ops.rollout(actor); trip 1 of 3" in text
    assert "ops.rollout(actor); trip 3 of 3, expected in 25% of iterations" in text
    assert "trip" not in plan_text(compiled_with(dapo(at_most=1), SPLIT).plan).split("loop:")[0]


# --- staleness, chunks and pauses -----------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_all_trips_sample_with_the_weights_of_the_first(staleness: int) -> None:
    placement = THREE.model_copy(update={"staleness": staleness})
    plan = compiled_with(dapo(at_most=3), placement).plan
    names = ["actor.rollout", "actor.rollout#2", "actor.rollout#3"]

    assert {(("actor@gen", staleness),)} == {runs(plan, name).reads for name in names}
    assert {staleness} == {largest_lag(plan)[name] for name in names}
    found = stale_rollouts(plan.graph)
    assert ({staleness} if staleness else set()) == {found[name] for name in found}


def test_what_is_left_over_is_an_update_older() -> None:
    kept = compiled_with(dapo(surplus="keep"), SPLIT).plan

    assert {"enough": 1} == stale_rollouts(kept.graph)
    assert 1 == kept.graph.node("actor.update").param("staleness")
    assert "rollout" == kept.graph.node("actor.update").param("old")
    one = compiled_with(dapo(surplus="keep"), SPLIT.model_copy(update={"staleness": 1})).plan
    assert 2 == stale_rollouts(one.graph)["enough"]
    assert "rollout_log_probs" in sources(kept.graph.node("enough"))


def test_the_first_gate_counts_what_the_iteration_before_has_left() -> None:
    plan = compiled_with(dapo(surplus="keep"), THREE.model_copy(update={"staleness": 2})).plan
    stage = dict(
        compiled_with(dapo(surplus="keep"), THREE.model_copy(update={"staleness": 2})).stages
    )["bind"]
    (dep,) = (d for d in stage.action("enough.gate").after if d.action == "enough")

    assert 1 == dep.distance
    for seed in range(4):
        assert [] == play(plan, seed)


def test_rows_left_over_that_come_too_late_for_old_weights_are_refused() -> None:
    """The second rollout waits for the loop before, and that for log-probs of newer weights."""
    graph = dapo(surplus="keep", again=True, reference=False)
    for staleness, pause_at in ((2, None), (3, 4)):
        said = {"staleness": staleness, "pause_at": pause_at}
        with pytest.raises(PlanError) as caught:
            compiled_with(graph, COLOCATE.model_copy(update=said))
        (finding,) = caught.value.findings
        assert "E129" == finding.code
        assert "is 2 updates behind, actor.log_probs reads the newest" in finding.got
    for said in ({"staleness": 1}, {"staleness": 2, "pause_at": 4}):
        assert compiled_with(graph, COLOCATE.model_copy(update=said)).plan
    apart = fitting(graph, SPLIT).model_copy(update={"staleness": 2})
    assert compiled_with(graph, apart).plan


def test_trips_are_cut_and_paused_like_any_rollout() -> None:
    said = {"staleness": 2, "pause_at": 4, "stream": 2}
    plan = compiled_with(dapo(at_most=2), THREE.model_copy(update=said)).plan
    pieces = [a for a in plan.actions if a.kind == "run" and a.chunk is not None]
    names = {a.node for a in pieces}

    assert {"actor.rollout", "actor.rollout#2", "actor.rollout.resumed#2", "reward#2"} <= names
    assert {"actor.rollout/cache", "actor.rollout#2/cache"} == {
        part.name for part in plan.parts if part.kind == "cache"
    }
    assert "actor.rollout#2" == plan.graph.node("actor.rollout.resumed#2").resumes
    assert {0: 2, 1: 1} == {
        a.trip.index: a.reads[0][1]
        for a in plan.actions
        if a.begins and a.trip is not None
    }  # fmt: skip
    gate = {"enough.gate"}
    for action in plan.actions:
        if action.trip is not None and action.trip.index == 1 and action.kind == "run":
            assert gate <= {dep.action for dep in action.after} or reaches(plan, action, gate)
    for seed in range(4):
        assert [] == play(plan, seed)


def reaches(plan: Plan, action: Action, wanted: set[str]) -> bool:
    """Whether an action comes after another in its turn."""
    waiting, seen = [action], set()
    while waiting:
        for dep in waiting.pop().after:
            if dep.distance == 0 and dep.action not in seen:
                seen.add(dep.action)
                waiting.append(plan.action(dep.action))
    return wanted <= seen


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(data=st.data(), graph=loops(), backend=st.sampled_from([None, "ray"]))
def test_plans_of_drawn_loops_verify_and_play(data: st.DataObject, graph: Graph, backend) -> None:
    plan = compiled_with(graph, data.draw(modes(graph)), backend=backend).plan

    assert [] == play(plan, data.draw(st.integers(0, 99)))
    trips = [a for a in plan.actions if a.trip is not None]
    assert {a.trip.of for a in trips if a.trip} == {
        int(n.param("at_most")) for n in plan.graph.nodes if n.ends_loop
    }
    for one in trips:
        assert one.trip is not None
        assert 0.0 <= one.chance <= 1.0
        assert one.trip.index or one.chance == 1.0


# --- plans that are wrong -------------------------------------------------------------------


def plan_to_break() -> Plan:
    """After `transfer`, so that no order on a device stands in for a dependency."""
    graph = dapo(at_most=3)
    compiled = compiled_with(graph, fitting(graph, TWO), backend="ray")
    plan = dict(compiled.stages)["transfer"]
    assert [] == verify(plan, "transfer")
    return plan


def test_a_trip_that_does_not_wait_for_the_gate_is_rejected() -> None:
    """What reads rows of its own trip comes after the gate with it; only the first need it."""
    plan = plan_to_break()
    for name, gate in (("prompts#2", "enough.gate"), ("prompts#3", "enough.gate#2")):
        early = plan
        for a in plan.actions:
            if a.trip is not None and a.trip == plan.action(name).trip:
                after = tuple(dep for dep in a.after if dep.action != gate)
                early = with_action(early, a.id, after=after)
        broken = verify(early, "transfer")
        assert f"{name} may start before {gate} says whether it is to run" in broken


def marks(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """An action in another trip, of another loop, with another goal, a gate or none."""
    for a in plan.actions:
        if a.trip is None:
            continue
        changes = [
            {"index": a.trip.index + 1},
            {"index": a.trip.index - 1},
            {"of": a.trip.of + 1},
            {"gate": not a.trip.gate},
            {"goal": a.trip.goal + 1},
            {"goal": a.trip.goal - 1},
            {"loop": "advantage"},
        ]
        for change in changes:
            trip = replace(a.trip, **change)
            yield f"{a.id} with {change}", with_action(plan, a.id, trip=trip)
        yield f"{a.id} of no trip", with_action(plan, a.id, trip=None)


def test_an_action_of_another_trip_than_its_node_is_rejected() -> None:
    survivors = [name for name, mutant in marks(plan_to_break()) if not verify(mutant, "transfer")]
    assert [] == survivors


def test_what_writes_weights_or_moves_them_is_of_no_trip() -> None:
    graph = dapo(at_most=3)
    plan = compiled_with(graph, SPLIT).plan
    trip = runs(plan, "prompts#2").trip
    moves = [a for a in plan.actions if a.writes]

    assert {"run", "reshard"} == {a.kind for a in moves}
    for a in moves:
        assert verify(with_action(plan, a.id, trip=trip), "timing")


def test_a_loop_that_reads_too_little_or_twice_is_rejected() -> None:
    plan = plan_to_break()
    end = plan.graph.node("enough")
    for index, bound in enumerate(end.inputs):
        others = (*end.inputs[:index], *end.inputs[index + 1 :])
        twice = replace(end.inputs[index - 1], name=bound.name)
        for inputs in (others, (*end.inputs, bound), (*others, twice)):
            broken = verify(with_node(plan, replace(end, inputs=inputs)), "unroll")
            assert broken, (str(bound), len(inputs))


def test_a_loop_that_reads_from_outside_is_rejected() -> None:
    compiled = compiled_with(counting(at_most=2), COLOCATE)
    plan = dict(compiled.stages)["unroll"]
    end, first = plan.graph.node("repeat"), plan.graph.node("grown").inputs[0]
    inputs = tuple(first if bound.source == "grown#2" else bound for bound in end.inputs)

    broken = verify(with_node(plan, replace(end, inputs=inputs)), "unroll")
    assert "repeat reads begun.begun as count from outside of its loop" in broken


@pytest.mark.parametrize("count", [2, 4])
def test_a_loop_with_other_trips_than_it_may_take_is_rejected(count: int) -> None:
    plan = plan_to_break()
    end = plan.graph.node("enough")
    params = tuple({**dict(end.params), "at_most": count}.items())

    broken = verify(with_node(plan, replace(end, params=params)), "unroll")
    assert f"enough takes at most {count} trips, the plan has [0, 1, 2]" in broken


def test_a_node_of_no_trip_is_rejected() -> None:
    plan = plan_to_break()
    for node in plan.graph.nodes:
        if node.trip is not None:
            broken = verify(with_node(plan, replace(node, trip=None)), "unroll")
            assert "the trips of enough are not told apart" in broken


def test_what_is_left_over_is_not_counted_before_it_is_there() -> None:
    graph = dapo(surplus="keep")
    placement = THREE.model_copy(update={"staleness": 2})
    plan = dict(compiled_with(graph, placement).stages)["transfer"]
    assert [] == verify(plan, "transfer")
    after = tuple(d for d in plan.action("enough.gate").after if d.action != "enough")

    broken = verify(with_action(plan, "enough.gate", after=after), "transfer")
    assert "enough.gate may count what enough has left over before it is over" in broken
