"""Pass `stream`: what is cut and what waits, what is refused, and how many chunks are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.plan import Action, Chunk, Plan, Spread, Timing
from rlflow.scheduler.stream import choose, crossing_chains
from rlflow.scheduler.verify import verify
from tests.scheduler.examples import APART, MESH, SPLIT, compiled_with, grpo, ppo
from tests.scheduler.strategies import (
    PLENTY,
    Case,
    cluster,
    exact,
    graph_of,
    graphs,
    judged,
    placements,
)

THREE = rf.Placement(
    pools={"train": 1, "gen": 1, "look": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("look")},
)
ONE_PLACE = rf.Placement(
    pools={"all": 1},
    assign={"*": rf.on("all"), "reward": rf.on("all"), "advantage": rf.on("all")},
)


def streamed(placement: rf.Placement, count: int | str) -> rf.Placement:
    return placement.model_copy(update={"stream": count})


def cut(graph: Graph, placement: rf.Placement, count: int | str, **options: object) -> Plan:
    return compiled_with(graph, streamed(placement, count), **options).plan


def runs(plan: Plan, node: str) -> list[Action]:
    return [a for a in plan.actions if a.kind == "run" and a.node == node]


def chunked(plan: Plan) -> set[str]:
    return {str(a.node) for a in plan.actions if a.kind == "run" and a.chunk is not None}


def read(action: Action) -> set[str]:
    return {dep.action for dep in action.after if dep.kind == "data"}


def notes(plan: Plan) -> str:
    return " ".join(note.text for note in plan.notes if note.rule == "stream")


def test_row_and_group_ops_are_cut_and_batch_ops_wait_for_all():
    plan = cut(grpo(epochs=2), THREE, 4)
    assert chunked(plan) == {
        "actor.rollout",
        "reward",
        "ref.log_probs",
        "actor.log_probs",
        "advantage",
    }
    for index in range(4):
        piece = f"[{index + 1}/4]"
        rollout = plan.action(f"actor.rollout{piece}")
        assert {"prompts"} == read(rollout)
        before = {dep.action for dep in rollout.after if dep.kind == "order"}
        assert (index > 0) is (f"actor.rollout[{index}/4]" in before)
        assert {f"actor.rollout{piece}"} == read(plan.action(f"ref.log_probs{piece}"))
        assert {f"actor.rollout{piece}", f"reward{piece}"} == read(plan.action(f"advantage{piece}"))
        assert Chunk(index=index, count=4) == plan.action(f"reward{piece}").chunk
    (update,) = runs(plan, "actor.update")
    wanted = {
        f"{node}[{n}/4]"
        for node in ("actor.rollout", "advantage", "ref.log_probs", "actor.log_probs")
        for n in (1, 2, 3, 4)
    }
    assert wanted == read(update)


def test_an_estimator_over_the_batch_is_not_cut():
    plan = cut(ppo(), APART, 2)
    assert {"actor.rollout", "reward", "ref.log_probs", "critic.values"} == chunked(plan)
    (advantage,) = runs(plan, "advantage")
    assert {f"critic.values[{n}/2]" for n in (1, 2)} < read(advantage)


def test_what_reads_other_rows_too_is_not_cut():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        whole = judged("whole", "batch", "", "pad")(reward)
        after = judged("after", "row", "", "pad")(whole.rename(reward="whole"))
        advantage = ops.advantage("grpo", samples, after.rename(reward="after"))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    plan = cut(graph_of(declare), SPLIT_NO_REF, 2)
    assert {"actor.rollout", "reward"} == chunked(plan)


SPLIT_NO_REF = rf.Placement(
    pools={"train": 1, "gen": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen")},
)


def test_a_chunk_costs_its_share_and_says_what_it_is_for():
    whole, plan = cut(ppo(), APART, 1), cut(ppo(), APART, 2)
    first = plan.action("actor.rollout[1/2]")
    assert "streamed" == first.reason.rule
    assert "critic.values can start on the first 4 groups" in first.reason.text
    (one,) = runs(whole, "actor.rollout")
    assert 0 < first.cost.seconds < one.cost.seconds
    assert 0 < first.cost.transient < one.cost.transient


def test_without_chunks_nothing_is_touched():
    compiled = compiled_with(ppo(), APART)
    stages = dict(compiled.stages)
    assert stages["stream"] is stages["bind"]
    assert all(action.chunk is None for action in compiled.plan.actions)


@pytest.mark.parametrize("count", [4, "auto"])
def test_one_place_gains_nothing(count):
    plan = cut(grpo(every=0), ONE_PLACE, count)
    assert set() == chunked(plan)
    assert "one piece" in notes(plan)


@pytest.mark.parametrize("count", [2, "auto"])
def test_a_pipeline_without_a_rollout_is_left_alone(count):
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        written = ops.tokenize(actor, ops.prompts(rf.data.arithmetic(digits=2), batch=8))
        ops.update(actor, written, loss=rf.SFTLoss())

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    plan = cut(graph_of(declare), placement, count)
    assert set() == chunked(plan)
    assert "one piece" in notes(plan)


@pytest.mark.parametrize(
    ("count", "fix"),
    [(3, "stream=2 or stream=4"), (5, "stream=4 or stream=8"), (16, "stream=8")],
)
def test_chunks_are_whole_prompts(count, fix):
    with pytest.raises(PlanError) as caught:
        cut(grpo(), SPLIT, count)
    (finding,) = caught.value.findings
    assert ("E224", fix) == (finding.code, finding.fix)
    assert f"8 prompts do not divide into {count} chunks" in finding.what


def test_an_op_that_refuses_uneven_parts_refuses_small_chunks():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        made = judged("judge", "group", "split", "refuse")(reward, samples)
        advantage = ops.advantage("grpo", samples, made.rename(reward="judge"))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(
        pools={"train": 1, "many": 4}, assign={"*": rf.on("train"), "judge": rf.on("many")}
    )
    graph = graph_of(declare)
    assert {2} == {a.chunk.count for a in cut(graph, placement, 2).actions if a.chunk}
    with pytest.raises(PlanError) as caught:
        cut(graph, placement, 4)
    assert ["E225"] == [finding.code for finding in caught.value.findings]
    assert "the 2 prompts of a chunk do not split over 4 ranks" in caught.value.findings[0].what
    assert all(a.chunk is None or a.chunk.count == 2 for a in cut(graph, placement, "auto").actions)


def test_fewer_prompts_than_ranks_leave_some_without_rows():
    plan = cut(grpo(), MESH, 8)
    assert 8 == len(runs(plan, "ref.log_probs"))


def bound(graph: Graph, placement: rf.Placement) -> Plan:
    return dict(compiled_with(graph, placement).stages)["bind"]


def timed(plan: Plan, period: float | None) -> Plan:
    if period is None:
        return replace(plan, timing=None)
    found = Timing(
        resource_bound=0.0,
        recurrence_bound=0.0,
        period=period,
        busiest="gen[0]",
        binding="order",
    )
    return replace(plan, timing=found)


@pytest.mark.parametrize(
    ("periods", "chosen", "said"),
    [
        (
            {1: 2.6, 2: 2.4, 4: 2.1, 8: 2.05},
            4,
            "4 chunks, 2.10 s an iteration against 2.60 s in one",
        ),
        ({1: 1.0, 2: 0.96, 4: 0.94, 8: 0.93}, 4, "4 chunks, 940.0 ms an iteration"),
        (
            {1: 1.0, 2: 0.97, 4: 1.2, 8: 3.0},
            1,
            "one piece, 1.00 s an iteration; 2 chunks would take 970.0 ms",
        ),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 1, "one piece"),
        ({1: None, 2: None, 4: None, 8: None}, 1, "is not known"),
        (
            {2: 2.0, 4: 1.0, 8: 1.0},
            4,
            "4 chunks, 1.00 s an iteration: in one piece it does not fit",
        ),
        ({1: 2.0}, 1, "no plan with chunks fits"),
    ],
)
def test_more_chunks_are_taken_where_they_save_enough(periods, chosen, said):
    plan = bound(grpo(), SPLIT)

    def planned(count: int) -> Plan:
        if count not in periods:
            raise PlanError()
        return timed(plan, periods[count])

    count, why = choose(plan, planned)
    assert chosen == count
    assert said in why


def test_if_nothing_fits_the_first_refusal_is_raised():
    def planned(count: int) -> Plan:
        raise PlanError(summary=f"{count} pieces")

    with pytest.raises(PlanError, match="1 pieces"):
        choose(bound(grpo(), SPLIT), planned)


def test_the_choice_is_noted_and_is_no_slower():
    whole, best = cut(ppo(), APART, 1), cut(ppo(), APART, "auto")
    assert best.timing.period <= whole.timing.period
    assert "an iteration" in notes(best)


@st.composite
def streams(draw: st.DrawFn) -> Case:
    """A case whose placement cuts, with chunks that may not divide."""
    graph = draw(graphs())
    placement = streamed(draw(placements(graph)), draw(st.sampled_from([2, 2, 4, 3])))
    devices = cluster("cpu", placement.num_devices(), PLENTY)
    return Case(graph, placement, devices, draw(st.sampled_from([None, "ray"])))


@settings(max_examples=60)
@given(streams())
def test_every_plan_in_chunks_verifies(case):
    """`compile` verifies after each pass; here the rules of cutting are asked once more."""
    try:
        plan = case.compile().plan
    except PlanError:
        assume(False)
    count = case.placement.stream
    for node in plan.graph.nodes:
        found = runs(plan, node.name)
        if found[0].chunk is None:
            assert 1 == len(found)
            continue
        assert [Chunk(index=i, count=count) for i in range(count)] == sorted(
            (a.chunk for a in found), key=lambda chunk: chunk.index
        )
        assert node.op.per != "batch"
        assert "pure" == node.op.effect
        assert 1 == node.every
        cut_sources = [runs(plan, source)[0].chunk is not None for source in node.sources]
        assert all(cut_sources) or node.op.rows == "expand"


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_plan_with_a_wrong_chunk_is_rejected(backend):
    """After `transfer`, so that no device's order stands in for a dependency."""
    compiled = compiled_with(grpo(epochs=2), streamed(THREE, 2), backend=backend)
    plan = dict(compiled.stages)["transfer"]
    assert [] == verify(plan, "transfer")
    survivors = [name for name, mutant in wrong_chunks(plan) if not verify(mutant, "transfer")]
    assert [] == survivors


def wrong_chunks(plan: Plan):
    """The plan with one chunk less, doubled, renumbered, or fed from another chunk."""
    other = {"[1/2]": "[2/2]", "[2/2]": "[1/2]"}
    for action in plan.actions:
        if action.chunk is None:
            continue
        rest = tuple(a for a in plan.actions if a.id != action.id)
        bridged = tuple(
            replace(
                a,
                after=tuple(d for d in a.after if d.action != action.id)
                + tuple(d for d in action.after if d.action not in (a.id, action.id)),
            )
            if any(d.action == action.id for d in a.after)
            else a
            for a in rest
        )
        yield f"no {action.id}", replace(plan, actions=bridged)
        for chunk in (None, Chunk(index=1 - action.chunk.index, count=2), Chunk(index=0, count=4)):
            changed = replace(action, chunk=chunk)
            actions = tuple(changed if a.id == action.id else a for a in plan.actions)
            yield f"{action.id} as {chunk}", replace(plan, actions=actions)
        if action.takes is not None and action.kind == "run":
            moved = replace(action, takes=Spread(parts=((97,),)))
            actions = tuple(moved if a.id == action.id else a for a in plan.actions)
            yield f"{action.id} takes elsewhere", replace(plan, actions=actions)
    for action in plan.actions:
        swapped = tuple(
            replace(dep, action=dep.action[:-5] + other[dep.action[-5:]])
            if dep.kind == "data" and dep.action[-5:] in other and action.chunk is not None
            else dep
            for dep in action.after
        )
        last = action.chunk is not None and action.chunk.index == 1
        if swapped != action.after and last:
            actions = tuple(
                replace(a, after=swapped) if a.id == action.id else a for a in plan.actions
            )
            yield f"{action.id} after the other chunk", replace(plan, actions=actions)


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_who_does_not_wait_for_the_last_chunk_is_rejected(backend):
    compiled = compiled_with(grpo(epochs=2), streamed(THREE, 2), backend=backend)
    plan = dict(compiled.stages)["transfer"]
    nodes = ("ref.log_probs", "advantage")
    checked = 0
    for name in (f"{node}[2/2]" for node in nodes):
        for reader in plan.actions:
            after = tuple(dep for dep in reader.after if dep.action != name or dep.kind != "data")
            if after == reader.after:
                continue
            early = replace(reader, after=after)
            actions = tuple(early if a.id == reader.id else a for a in plan.actions)
            broken = verify(replace(plan, actions=actions), "transfer")
            assert any(f"may start before {name}" in text for text in broken), (name, reader.id)
            checked += 1
    assert len(nodes) == checked


def test_a_chunk_on_another_instance_is_rejected():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        ops.metrics(ops.log_probs(ref, samples, name="here"), name="one")
        ops.metrics(ops.log_probs(ref, samples, temperature=0.5, name="there"), name="two")
        ops.update(actor, samples, loss=rf.SFTLoss())

    placement = rf.Placement(
        pools={"train": 1, "gen": 1, "look": 1},
        assign={"*": rf.on("train"), "here": rf.on("gen"), "there": rf.on("look")},
        stream=2,
    )
    plan = dict(compiled_with(graph_of(declare), placement).stages)["stream"]
    last, other = plan.action("here[2/2]"), plan.action("there[2/2]")
    moved = replace(
        last,
        pool=other.pool,
        devices=other.devices,
        instance=other.instance,
        needs=other.needs,
        reads=other.reads,
        takes=other.takes,
        makes=other.makes,
    )
    actions = tuple(moved if a.id == last.id else a for a in plan.actions)
    broken = verify(replace(plan, actions=actions), "stream")
    assert ["here[2/2] is done otherwise than here[1/2]"] == broken


def test_chunks_within_a_group_are_rejected():
    plan = dict(compiled_with(grpo(every=0), streamed(THREE, 2)).stages)["stream"]
    nodes = tuple(
        replace(node, params=tuple({**dict(node.params), "batch": 7}.items()))
        if node.name == "prompts"
        else node
        for node in plan.graph.nodes
    )
    broken = verify(replace(plan, graph=replace(plan.graph, nodes=nodes)), "stream")
    assert "reward is cut into 2 chunks, within the groups of its 7 prompts" in broken


def test_a_batch_op_in_chunks_is_rejected():
    whole = cut(ppo(), APART, 1)
    stages = dict(compiled_with(ppo(), APART).stages)
    plan = stages["bind"]
    (advantage,) = runs(plan, "advantage")
    actions = []
    for action in plan.actions:
        if action.id == "advantage":
            actions += [
                replace(advantage, id=f"advantage[{n}/2]", chunk=Chunk(index=n - 1, count=2))
                for n in (1, 2)
            ]
        else:
            after = tuple(
                replace(dep, action=f"advantage[{n}/2]") if dep.action == "advantage" else dep
                for dep in action.after
                for n in (1, 2)
            )
            actions.append(replace(action, after=tuple(dict.fromkeys(after))))
    broken = verify(replace(plan, actions=tuple(actions)), "bind")
    assert any("takes its batch at once" in text for text in broken)
    assert [] == verify(whole, "timing")


def test_chains_that_cross_are_found():
    (chain,) = crossing_chains(bound(ppo(), APART))
    assert ("actor.rollout", 8) == (chain.root.name, chain.prompts)


def test_equal_input_gives_equal_plans():
    one, two = (cut(ppo(), APART, "auto", backend="ray") for _ in range(2))
    assert one.hash == two.hash
