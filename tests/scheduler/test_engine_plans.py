"""Plans with engines in processes of their own: instances, pools, sleeps, notes, keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import Compiled, dump_plan
from rlflow.scheduler.costs.layouts import lacking
from rlflow.scheduler.devices.hardware import ENGINE_ASLEEP
from rlflow.scheduler.devices.measured import MeasuredCosts, Record, Sample
from rlflow.scheduler.engines.engines import ROOM, with_pool
from rlflow.scheduler.observed import estimate, key_of
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.engines import engines_are_apart, engines_sleep_between_rollouts
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.verify import STAGES, verify
from tests.budget import examples
from tests.scheduler.examples import compiled_with, grpo, ppo
from tests.scheduler.mutants import mutants, with_action
from tests.scheduler.player import play
from tests.scheduler.proving import holds_and_plays, unnoticed
from tests.scheduler.strategies import (
    PLENTY,
    Case,
    cluster,
    compiled_or_rejected,
    engines_on,
    exact,
    graph_of,
    placements,
)

ENGINE = "actor@all/sglang"


def colocated(engine: object = "sglang", **more: object) -> rf.Placement:
    assign = {"*": rf.on("all"), "actor.rollout": rf.on("all", engine=engine, **more)}
    return rf.Placement(pools={"all": 1}, assign=assign)


def split(engine: object = "sglang", gen: int = 1, train: int = 1, **more: object) -> rf.Placement:
    return rf.Placement(
        pools={"train": train, "gen": gen},
        assign={
            "actor": rf.on("train"),
            "actor.rollout": rf.on("gen", engine=engine, **more),
            "ref": rf.on("train"),
        },
    )


def hybrid(engine: object = "sglang", **more: object) -> rf.Placement:
    """Two devices train, two generate, and one of them does both."""
    rollout = rf.on("gen", engine=engine, **more)
    assign = {"*": rf.on("train"), "actor.rollout": rollout}
    return rf.Placement(pools={"train": [0, 1], "gen": [1, 2]}, assign=assign)


def tight() -> Compiled:
    """Weights of 52 MB and a pool of 33 MB, with room for either beside what trains."""
    placement = colocated(rf.SGLang(max_total_tokens=4000))
    return compiled_with(grpo(path="models/wide", every=0), placement, share=0.7)


def adapted(path: str = "models/mid", **lora: object) -> Graph:
    """GRPO of a model with adapters, and a reference without."""

    def declare() -> None:
        adapters = rf.LoRA(**{"rank": 4, **lora})
        actor = rf.Model("actor", path, optimizer=rf.AdamW(lr=1e-3), lora=adapters)
        ref = rf.Model("ref", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
        ops.update(actor, samples, advantage, ops.log_probs(ref, samples), loss=loss)

    return graph_of(declare, "adapted")


EXAMPLES = {
    "colocated": lambda: compiled_with(grpo(), colocated()),
    "tight": tight,
    "split": lambda: compiled_with(grpo(), split()),
    "ranks": lambda: compiled_with(grpo(), split(gen=4, train=2, tp=2)),
    "gpus": lambda: compiled_with(
        grpo(path="models/wide"), split(gen=2, train=2, tp=2), kind="h100"
    ),
    "streamed": lambda: compiled_with(grpo(), split().model_copy(update={"stream": 2})),
    "adapted": lambda: compiled_with(adapted(), split(gen=4, train=2, tp=2)),
    "adapted tight": lambda: compiled_with(adapted("models/wide"), colocated(), share=0.85),
    "hybrid": lambda: compiled_with(
        grpo(path="models/wide", every=0), hybrid(rf.SGLang(max_total_tokens=4000)), share=0.7
    ),
    "paused": lambda: compiled_with(
        grpo(), split().model_copy(update={"staleness": 2, "pause_at": 4})
    ),
}


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Compiled:
    return EXAMPLES[request.param]()


@pytest.mark.rows(4)
def test_examples_hold_after_every_pass_and_play(example: Compiled) -> None:
    holds_and_plays(example)


@pytest.mark.rows(3)
def test_every_mutant_is_rejected(example: Compiled) -> None:
    assert [] == unnoticed(example.plan)


@st.composite
def engine_plans(draw: Callable[[st.SearchStrategy], object]) -> Plan:
    """A plan of a random placement in which an engine makes the actor's samples."""
    graphs = [grpo(), grpo(path="models/wide", every=0), ppo(), adapted(), adapted("models/wide")]
    graph = draw(st.sampled_from(graphs))
    placement = draw(placements(graph))
    assign = {**placement.assign, "actor.rollout": draw(engines_on(placement.pools))}
    placement = placement.model_copy(update={"assign": assign})
    kind = draw(st.sampled_from(["cpu", "cpu", "h100"]))
    roomy = Case(graph, placement, cluster(kind, placement.num_devices(), PLENTY))
    peak = max(compiled_or_rejected(roomy).plan.peaks.values())
    case = roomy.with_memory(int(peak * draw(st.sampled_from([2.0, 0.9, 0.8, 0.7, 0.6]))))
    return compiled_or_rejected(case).plan


@pytest.mark.slow
@settings(max_examples=examples(12))
@given(plan=engine_plans(), seed=st.integers(0, 99), pick=st.integers(0, 10**6))
def test_random_plans_with_an_engine_play_and_their_mutants_do_or_are_rejected(
    plan: Plan, seed: int, pick: int
) -> None:
    """Every plan is verified as it compiles; what a wrong one does, the verifier has seen."""
    assert [] == play(plan, seed)
    every = list(mutants(plan))
    _, wrong = every[pick % len(every)]
    assert verify(wrong, "timing") or not play(wrong, seed)
    for i in plan.instances:
        if i.options is not None:
            sleeps = [a for a in plan.actions if a.instance == i.name and a.kind == "sleep"]
            assert i.options.memory_saver is bool(sleeps)


def test_an_engine_is_an_instance_of_its_own_with_a_pool_beside_its_weights() -> None:
    plan = EXAMPLES["colocated"]().plan
    engine = plan.instance(ENGINE)
    assert ("sglang", ("rollout",), False) == (engine.engine, engine.uses, engine.trained)
    assert "whole sglang" == engine.layout()
    assert [f"{ENGINE}/weights", f"{ENGINE}/pool"] == [
        p.name for p in plan.parts if p.instance == ENGINE
    ]
    assert (f"{ENGINE}/weights", f"{ENGINE}/pool") == plan.action("actor.rollout").needs
    reshard = plan.action(f"reshard:actor@all->{ENGINE}")
    assert ("actor@all/weights", f"{ENGINE}/weights") == reshard.needs


def test_the_default_engine_leaves_no_trace() -> None:
    plan = compiled_with(grpo(), colocated(engine="torch")).plan
    assert ["actor@all", "ref@all"] == [i.name for i in plan.instances]
    assert "sglang" not in dump_plan(plan)
    assert all("options" not in found for found in plan.to_json()["instances"])


def test_a_pool_holds_all_rows_at_their_longest_and_one_more() -> None:
    """8 prompts of 2 samples of 5 + 8 tokens; of the evaluation 16 rows: 17 x 13 tokens.

    Each takes 2 x 2 layers x 2 heads x 64 numbers of 4 bytes.
    """
    engine = EXAMPLES["colocated"]().plan.instance(ENGINE)
    assert engine.options is not None
    tokens = engine.options.max_total_tokens
    assert tokens is not None
    assert 0 == tokens % 17
    pool = EXAMPLES["colocated"]().plan.part(f"{ENGINE}/pool")
    assert tokens * 2 * 2 * 2 * 64 * 4 == pool.size
    assert 0 == pool.residual


def test_replicas_have_pools_for_their_own_rows() -> None:
    one = compiled_with(grpo(every=0), split()).plan.instance("actor@gen/sglang").options
    two = compiled_with(grpo(every=0), split(gen=2)).plan.instance("actor@gen/sglang").options
    assert one is not None
    assert two is not None
    rows = one.max_total_tokens // 17
    assert (8 + 2 + 1) * rows == two.max_total_tokens


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({"max_total_tokens": 300}, 300), ({"max_total_tokens": 10**6}, 10**6)],
)
def test_a_pool_is_as_large_as_said(options: dict[str, int], tokens: int) -> None:
    plan = compiled_with(grpo(), colocated(rf.SGLang(**options))).plan
    assert tokens * 2 * 2 * 2 * 64 * 4 == plan.part(f"{ENGINE}/pool").size


def test_a_pool_takes_what_a_fraction_of_the_memory_leaves_beside_the_weights() -> None:
    memory = 100_000_000
    placement = colocated(rf.SGLang(mem_fraction_static=0.25))
    plan = compiled_with(grpo(), placement, memory=memory).plan
    weights = plan.part(f"{ENGINE}/weights").size
    token = 2 * 2 * 2 * 64 * 4
    assert (memory // 4 - weights) // token * token == plan.part(f"{ENGINE}/pool").size


def test_a_pool_is_cut_to_the_room_and_holds_a_row_at_least() -> None:
    compiled = compiled_with(grpo(every=0), colocated())
    plan, costs = compiled.plan, costs_of(compiled)
    unsized = replace(plan.instance(ENGINE), options=rf.SGLang())
    nodes = [plan.graph.node("actor.rollout")]
    row, each = sum(costs.tokens(nodes[0])), 2 * 2 * 2 * 64 * 4
    beside = costs.weights(unsized) + costs.held(nodes[0], unsized, 1)

    def tokens(room: float) -> int:
        options = with_pool(unsized, nodes, int(room), costs).options
        assert options is not None
        assert options.max_total_tokens is not None
        return options.max_total_tokens

    assert 17 * row == tokens(1e12)
    assert 5 * row == tokens((beside + 5 * row * each + each) / ROOM)
    assert row == tokens(beside)


def test_what_fits_does_not_sleep_and_cannot() -> None:
    plan = EXAMPLES["colocated"]().plan
    assert [] == [a.id for a in plan.actions if a.part is not None]
    assert plan.instance(ENGINE).options.memory_saver is False


def test_wakes_are_staged_weights_then_reshard_then_rollout() -> None:
    plan = tight().plan
    order = [a.id for a in plan.actions]
    reshard, weights = f"reshard:actor@all->{ENGINE}", f"wake:{ENGINE}/weights"
    assert order.index(weights) < order.index(reshard)
    waits = {dep.action for dep in plan.action(reshard).after}
    assert weights in waits
    assert f"wake:{ENGINE}/pool" not in waits
    moves = {a.id: a.mode for a in plan.actions if a.part and a.part.startswith(ENGINE)}
    assert {"discard"} == set(moves.values())
    assert 4 == len(moves)
    assert plan.instance(ENGINE).options.memory_saver is True
    pool = plan.action(f"sleep:{ENGINE}/pool").reason.text
    assert "of no use between two rollouts" in pool
    assert "allocated, the rollout fills it" in plan.action(f"wake:{ENGINE}/pool").reason.text


def test_an_engine_that_may_not_give_memory_back_never_does() -> None:
    placement = colocated(rf.SGLang(memory_saver=False))
    memory = max(tight().plan.budgets[0], 1)
    with pytest.raises(PlanError) as refused:
        compiled_with(grpo(path="models/wide", every=0), placement, memory=memory)
    assert "E401" == refused.value.findings[0].code
    assert f"{ENGINE}/weights, which stays" in refused.value.findings[0].got


def test_a_process_keeps_memory_while_it_sleeps_on_accelerators() -> None:
    gpus = EXAMPLES["gpus"]().plan
    part = gpus.part("actor@gen/sglang/weights")
    assert int(ENGINE_ASLEEP) + 512 * 2**21 == part.residual
    assert part.size > part.residual
    assert 0 == EXAMPLES["split"]().plan.part("actor@gen/sglang/weights").residual


def test_pieces_of_a_rollout_stay_in_the_pool_and_the_engine_awake() -> None:
    plan = EXAMPLES["streamed"]().plan
    assert [] == [p.name for p in plan.parts if p.kind == "cache"]
    held = [p for p in plan.parts if p.instance == "actor@gen/sglang"]
    assert [p.size for p in held] == [p.residual for p in held]
    assert "finish" == plan.action("actor.rollout[1/2]").chunk.by


def test_two_rollouts_in_pieces_by_one_engine_both_go_on_in_its_pool() -> None:
    plan = compiled_with(greedy(probed=True), split().model_copy(update={"stream": 2})).plan
    assert [] == [p.name for p in plan.parts if p.kind == "cache"]
    for name in ("actor.rollout[1/2]", "probe[1/2]"):
        assert "finish" == plan.action(name).chunk.by
        assert plan.action(name).needs == ("actor@gen/sglang/weights", "actor@gen/sglang/pool")


def test_a_sleep_between_two_pieces_is_rejected() -> None:
    plan = tight().plan
    chunked = plan.action("actor.rollout")
    streamed = EXAMPLES["streamed"]().plan.action("actor.rollout[1/2]").chunk
    wrong = with_action(plan, chunked.id, chunk=streamed, begins=True)
    said = list(engines_sleep_between_rollouts(Facts(plan=wrong)))
    assert any("has rows left to generate" in text for text in said)


def test_weights_reach_an_engine_whole_where_its_first_rank_is() -> None:
    """2 replicas of tp=2, of 2 ranks that train: each replica lacks the whole model once."""
    plan = EXAMPLES["ranks"]().plan
    source, engine = plan.instance("actor@train"), plan.instance("actor@gen/sglang")
    assert (2, 4) == engine.owners
    assert {2} == set(lacking(source, engine).values())
    rollout = plan.action("actor.rollout")
    assert ((2,), (4,)) == rollout.takes.parts
    assert (2, 3, 4, 5) == rollout.devices


def test_notes_say_what_an_engine_is_and_that_seeds_are_ignored() -> None:
    text = plan_text(EXAMPLES["split"]().plan)
    assert "actor@gen/sglang  resharded  whole sglang" in text
    assert "engine: actor@gen/sglang is SGLang in a process of its own, with a pool of" in text
    assert "not replayable on CPU: SGLang ignores seeds there" in text
    assert "seeds: " not in plan_text(compiled_with(greedy(), split()).plan)
    gpus = plan_text(EXAMPLES["gpus"]().plan)
    assert "rf.SGLang(deterministic=True) ends that" in gpus
    calm = split(rf.SGLang(deterministic=True))
    assert "seeds: " not in plan_text(compiled_with(grpo(), calm, kind="h100").plan)


def greedy(*, probed: bool = False) -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, temperature=0)
        reward = ops.reward(exact, samples)
        ref_lp = ops.log_probs(ref, samples)
        advantage = ops.advantage("grpo", samples, reward)
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
        ops.update(actor, samples, advantage, ref_lp, loss=loss)
        if probed:
            probe = ops.rollout(actor, prompts, n=2, max_new_tokens=4, name="probe")
            ops.metrics(ops.reward(exact, probe, name="exact"), name="probe.metrics")

    return graph_of(declare, "greedy")


def test_explaining_a_move_names_the_part() -> None:
    plan = tight().plan
    text = explain(plan, plan.action(f"sleep:{ENGINE}/pool"))
    assert f"pool of {ENGINE}" in text
    assert "assumed per call of an engine" in text


def test_a_saved_plan_comes_back_equal(tmp_path: Path) -> None:
    plan = tight().plan
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert plan.hash == read_plan(path).hash
    told = {
        found["name"]: found.get("options") for found in json.loads(path.read_text())["instances"]
    }
    assert told[ENGINE]["memory_saver"] is True


def test_moves_of_engines_are_measured_under_keys_of_their_own() -> None:
    plan, costs = tight().plan, costs_of(tight())
    keys = {a.id: key_of(plan, costs, a) for a in plan.actions if a.kind != "run"}
    assert len(set(keys.values())) >= 4
    reshard = plan.action(f"reshard:actor@all->{ENGINE}")
    key = keys[reshard.id]
    record = Record(key, costs.setting, 1, (Sample("run", 3, 1.5, 0.25),))
    measured = replace(
        costs, cluster=replace(costs.cluster, measured=MeasuredCosts(records=(record,)))
    )
    assert pytest.approx(1.75) == estimate(plan, measured, reshard).seconds
    assert estimate(plan, costs, reshard).seconds == pytest.approx(reshard.cost.seconds)
    torch = compiled_with(
        grpo(path="models/wide", every=0),
        rf.Placement(
            pools={"all": 1},
            assign={"*": rf.on("all"), "actor.rollout": rf.on("all", weights="own")},
        ),
    ).plan
    plain = next(a for a in torch.actions if a.kind == "reshard")
    assert key != key_of(torch, costs, plain)


def costs_of(compiled: Compiled):
    from rlflow.scheduler.costs.estimate import Costs
    from rlflow.scheduler.models.shapes import model_shape

    plan = compiled.plan
    shapes = {m.name: model_shape(m, None) for m in plan.graph.models}
    devices = cluster("cpu", 1, plan.budgets[0])
    return Costs(graph=plan.graph, cluster=devices, shapes=shapes)


def test_a_reshard_brings_an_engine_adapters_alone() -> None:
    """Of rank 4 on q, 256 to 256 numbers, and v, 256 to 128, in two layers; in 4 bytes each."""
    plan = EXAMPLES["adapted"]().plan
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    sizes = 2 * 4 * (512 + 384) * 4
    # Two replicas of two ranks lack them once each.
    assert 2 * sizes == reshard.cost.moved
    assert 2 == len(plan.instance("actor@gen/sglang").owners)


def test_the_weights_of_an_engine_include_its_adapters() -> None:
    plans = [compiled_with(adapted(rank=rank), split()).plan for rank in (4, 8)]
    one, two = (plan.part("actor@gen/sglang/weights") for plan in plans)
    assert 2 * 4 * (512 + 384) * 4 == two.size - one.size == two.on_host - one.on_host


def test_an_update_of_adapters_spares_the_way_of_the_weights_below_them() -> None:
    """From the host's memory to the engine's device, besides the way to the host's memory."""
    costs = []
    for graph in (adapted("models/wide", rank=1), grpo(path="models/wide", every=0)):
        plan = compiled_with(graph, split(), kind="h100").plan
        (reshard,) = (a for a in plan.actions if a.kind == "reshard")
        costs.append(reshard.cost)
    kind = cluster("h100", 1, PLENTY).kind_of(0)
    spared = (costs[1].moved - costs[0].moved) / (kind.host_link * kind.reached)
    assert costs[1].seconds - costs[0].seconds > spared


def test_an_engine_with_adapters_keeps_what_lies_below_them_asleep() -> None:
    plan = EXAMPLES["adapted tight"]().plan
    moves = {a.kind: a.mode for a in plan.actions if a.part == f"{ENGINE}/weights"}
    assert {"sleep": "offload", "wake": "offload"} == moves


def test_a_plan_with_adapters_that_an_engine_has_not_is_rejected() -> None:
    plan = EXAMPLES["adapted"]().plan
    assert [] == list(engines_are_apart(Facts(plan=plan)))
    other = tuple(
        i if i.options is None else replace(i, options=rf.VLLM(memory_saver=False))
        for i in plan.instances
    )
    said = list(engines_are_apart(Facts(plan=replace(plan, instances=other))))
    assert any("adapters that it has not" in text for text in said)


def test_engines_beside_an_embedded_rollout_serve_apart() -> None:
    placement = colocated()
    assign = {**placement.assign, "eval": rf.on("all")}
    plan = compiled_with(grpo(), placement.model_copy(update={"assign": assign})).plan
    assert {"actor.rollout": ENGINE, "eval": "actor@all"} == {
        a.id: a.instance for a in plan.actions if a.id in ("actor.rollout", "eval")
    }
    assert isinstance(plan, Plan)


@pytest.mark.parametrize("kind", ["cpu", "h100"])
def test_ranks_of_an_engine_whose_first_one_trains_need_nothing_from_others(kind: str) -> None:
    """The second rank is no process that holds weights, and none of those that train."""
    options = rf.SGLang(max_total_tokens=4000)
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen", engine=options, tp=2)}
    placement = rf.Placement(pools={"train": [0], "gen": [0, 1]}, assign=assign)
    plan = compiled_with(grpo(every=0), placement, kind=kind).plan
    (reshard,) = (action for action in plan.actions if action.kind == "reshard")
    how = "copy" if kind == "cpu" else "broadcast"
    assert (how, (0, 1)) == (reshard.transport, reshard.devices)
    assert not verify(plan, STAGES[-1])
