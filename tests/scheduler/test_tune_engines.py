"""The search with engines in processes of their own: offered where named, pasted, never worse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster, parse_cluster
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.search.bounds import Figures, PeriodBounds
from rlflow.scheduler.search.candidates import Moves
from rlflow.scheduler.search.engines import by_engine, with_engines
from rlflow.scheduler.search.known_costs import KnownCosts
from rlflow.scheduler.search.layouts import Layout
from rlflow.scheduler.search.space import Candidate, Choice, placed_uses, placement_of
from rlflow.scheduler.search.text import placement_source, tuned_text
from rlflow.scheduler.search.tune import SearchLimits, _rewritten, search_placements
from tests.budget import examples
from tests.scheduler.examples import COLOCATE, SPLIT, grpo, ppo
from tests.scheduler.strategies import exact, graph_of
from tests.scheduler.test_engine_drafters import drafted, placed
from tests.scheduler.test_engine_plans import colocated, split
from tests.scheduler.test_tune import adapters, big, large_batch, shortest

EAGER = rf.SGLang(cuda_graph=False)
EAGER_SOURCE = "SGLang(cuda_graph=False)"
QUICK = SearchLimits(plans=40, engine="sglang")


def moves_of(graph, where, placements, name=None):
    shapes = {model.name: model_shape(model) for model in graph.models}
    costs = KnownCosts(graph=graph, cluster=where, shapes=shapes)
    plan = _rewritten(graph, where, costs)
    roles = with_engines(placed_uses(plan.graph), placements, name, costs)
    figures = Figures(plan, costs, roles)
    bounds = PeriodBounds(plan.graph, figures)
    return Moves(figures=figures, bounds=bounds, cluster=where, staleness=0, streams=(1, 2))


def offered(placements, name=None, graph=None):
    """The engines of the rollouts, by what they are called; the embedded one is None."""
    moves = moves_of(graph or grpo(), cpu_cluster(2, threads=1, memory=1e9), placements, name)
    assert {(None,)} == {role.engines for role in moves.roles if not role.rollout}
    (role,) = (role for role in moves.roles if role.rollout)
    return [options and options.describe() for options in role.engines]


def test_engines_are_offered_where_a_placement_or_the_user_names_them():
    assert [None] == offered({"split": SPLIT})
    assert [None, "sglang"] == offered({"split": SPLIT, "apart": split()})
    several = {"a": colocated(EAGER), "b": split(EAGER), "c": split("vllm")}
    assert [None, "sglang(cuda_graph=False)", "vllm"] == offered(several)
    assert ["sglang"] == offered({"split": SPLIT}, "sglang")
    assert ["sglang(cuda_graph=False)"] == offered(several, "sglang")
    assert [None] == offered(several, "torch")


def test_an_engine_that_cannot_run_the_model_is_refused_by_name_alone():
    assert [None] == offered({"split": SPLIT}, graph=adapters())
    with pytest.raises(PlanError) as refused:
        offered({"split": SPLIT}, "vllm", adapters())
    assert "E249" == refused.value.findings[0].code
    with pytest.raises(PlanError) as unknown:
        offered({"split": SPLIT}, "sgland")
    assert ("E245", ("sglang",)) == (
        unknown.value.findings[0].code,
        unknown.value.findings[0].near[:1],
    )


def test_a_drafter_of_any_rollout_of_a_role_is_looked_at():
    """vLLM drafts not, also where the second rollout alone has a drafter."""

    def declare():
        actor, small = rf.Model("actor", "models/mid"), rf.Model("drafter", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        for name, drafter in (("one", None), ("two", small)):
            how = {"drafter": drafter, "temperature": 0.0, "name": name, "max_new_tokens": 8}
            found = ops.rollout(actor, prompts, **how)
            ops.metrics(ops.reward(exact, found, name=f"{name}.right"), name=f"{name}.metrics")

    graph = graph_of(declare)
    with pytest.raises(PlanError) as refused:
        offered({"split": SPLIT}, "vllm", graph)
    (finding,) = refused.value.findings
    assert "E249" == finding.code
    assert finding.what.startswith("two: ")
    where, named = cpu_cluster(2, threads=1, memory=1e9), {"vllm": split("vllm")}
    (role,) = moves_of(graph, where, named).roles
    assert (None,) == role.engines
    (role,) = moves_of(graph, where, {}, "sglang").roles
    assert ("sglang",) == tuple(options.engine for options in role.engines)


def test_what_an_engine_refuses_to_draft_is_said_and_is_no_lack_of_memory():
    """On a CPU; on an accelerator it drafts at any temperature, also where a CPU is beside it."""
    graph, pipeline = drafted(temperature=1.0), {"c": COLOCATE}
    with pytest.raises(PlanError) as refused:
        search_placements(graph, pipeline, cpu_cluster(2, threads=1, memory=1e9), limits=QUICK)
    (finding,) = refused.value.findings
    assert ("E630", '"actor.rollout": rf.on("all")') == (finding.code, finding.fix)
    tuned = search_placements(graph, pipeline, parse_cluster("h100:2", 2, 1), limits=QUICK)
    assert {"drafter"} == {i.drafter for i in tuned.best.plan.instances if i.options}
    named = {"c": COLOCATE, "apart": placed()}
    tuned = search_placements(
        graph, named, cpu_cluster(2, threads=1, memory=1e9), limits=SearchLimits(plans=10)
    )
    assert "torch" == {i.engine for i in tuned.best.plan.instances if "rollout" in i.uses}.pop()


def test_a_drafter_unlike_the_policy_is_said_of_the_engine_asked_for():
    graph = drafted(lora=rf.LoRA(rank=4))
    with pytest.raises(PlanError) as refused:
        search_placements(graph, {}, cpu_cluster(2, threads=1, memory=1e9), limits=QUICK)
    assert ["E639"] == [finding.code for finding in refused.value.findings]


def test_where_all_plans_are_refused_for_one_thing_that_is_raised():
    placement = placed(engine=rf.SGLang(updates="disk", max_total_tokens=1000))
    with pytest.raises(PlanError) as refused:
        search_placements(
            drafted(), {"disk": placement}, cpu_cluster(2, threads=1, memory=1e9), limits=QUICK
        )
    assert ["E676"] == [finding.code for finding in refused.value.findings]
    with pytest.raises(PlanError) as refused:
        search_placements(
            drafted(), {"disk": placement}, cpu_cluster(2, threads=1, memory=1e4), limits=QUICK
        )
    assert ["E240"] == [finding.code for finding in refused.value.findings]


def test_written_placements_take_the_engine_that_is_asked_for():
    roles = moves_of(grpo(), cpu_cluster(2, threads=1), {}, "sglang").roles
    eval_apart = SPLIT.model_copy(update={"assign": {**SPLIT.assign, "eval": rf.on("gen", tp=1)}})
    found = by_engine({"split": SPLIT, "own": split(EAGER), "eval": eval_apart}, roles, "sglang")
    assert ["split with sglang", "own", "eval with sglang"] == list(found)
    assert split(EAGER) == found["own"]
    assert rf.on("gen", engine="sglang") == found["split with sglang"].assign["actor.rollout"]
    assert rf.on("gen", tp=1, engine="sglang") == found["eval with sglang"].assign["eval"]
    assert {"split": SPLIT} == by_engine({"split": SPLIT}, roles, None)
    torch = moves_of(grpo(), cpu_cluster(2, threads=1), {}, "torch").roles
    found = by_engine({"own": split()}, torch, "torch")
    assert {"actor@train", "actor@gen", "ref@train"} == {
        i.name
        for i in compile_plan(
            grpo(), found["own with torch"], cpu_cluster(2, threads=1)
        ).plan.instances
    }


@pytest.mark.parametrize("engine", ["", "sglang", "sglang(cuda_graph=False)"])
def test_a_candidate_is_compiled_and_pasted_as_it_says(engine):
    graph, where = ppo(), cpu_cluster(4, threads=1, memory=1e9)
    roles = moves_of(graph, where, {"a": colocated(), "b": colocated(EAGER)}).roles
    candidate = Candidate(
        (
            Choice(0, 2, Layout(fsdp=2)),
            Choice(0, 4, Layout(tp=2, engine=engine)),
            Choice(2, 4, Layout(offload=True)),
            Choice(2, 4, Layout(fsdp=2)),
        )
    )
    placement = placement_of(candidate, roles)
    assert placement == eval(placement_source(placement), {"rf": rf})
    held = {i.name: i.layout() for i in compile_plan(graph, placement, where).plan.instances}
    name = engine.partition("(")[0]
    assert f"tp=2 x2 {name}".strip() == held["actor@gen" + (f"/{name}" if name else "")]
    said = {"": "", "sglang": 'engine="sglang"'}.get(engine, f"engine=rf.{EAGER_SOURCE}")
    assert said in placement_source(placement)


def test_a_role_that_only_samples_does_not_give_its_engine_to_others():
    """Where it comes first, `*` has its devices and not its engine."""
    roles = moves_of(grpo(), cpu_cluster(2, threads=1), {"a": colocated()}).roles
    first = tuple(sorted(roles, key=lambda role: not role.rollout))
    choices = tuple(Choice(0, 2, Layout(engine="sglang" if role.rollout else "")) for role in first)
    placement = placement_of(Candidate(choices), first)
    assert rf.on("all") == placement.assign["*"].model_copy(update={"fsdp": None})
    assert "sglang" == placement.assign["actor.rollout"].engine


@settings(max_examples=examples(25))
@given(data=st.data())
def test_no_plan_of_an_engine_is_shorter_than_its_bound(data):
    build = data.draw(st.sampled_from([grpo, ppo]))
    kind = data.draw(st.sampled_from(["cpu:4@1GB", "h100:4"]))
    graph, where = build(), parse_cluster(kind, 4, 1)
    moves = moves_of(graph, where, {}, data.draw(st.sampled_from(["sglang", "vllm"])))
    ranges = [(0, 4), (0, 2), (2, 4), (1, 3)]
    choices = []
    for number, role in enumerate(moves.roles):
        at = data.draw(st.sampled_from(ranges)) if number else (0, 4)
        choices.append(data.draw(st.sampled_from(moves.figures.fitting(number, at))))
        assert bool(choices[-1].layout.engine) is role.rollout
    candidate = Candidate(tuple(choices), stream=data.draw(st.sampled_from([1, 2])))
    try:
        placement = placement_of(candidate, moves.roles)
        plan = compile_plan(graph, placement, where, verified=False).plan
    except PlanError:
        return
    assert moves.bounds.period(candidate) <= plan.timing.period * (1 + 1e-9)


@pytest.mark.rows(1)
@pytest.mark.parametrize("devices", ["cpu:2@4GB", "h100:4"])
def test_rows_of_a_search_with_an_engine_are_pasted_to_what_they_promise(devices):
    where = parse_cluster(devices, 2, 1)
    graph = big(grpo(), "shape:qwen2.5-0.5b") if where.kind.name != "cpu" else grpo()
    tuned = search_placements(graph, {"colocate": COLOCATE, "split": SPLIT}, where, limits=QUICK)
    for row in tuned.rows[:4]:
        pasted = eval(placement_source(row.placement), {"rf": rf})
        plan = compile_plan(graph, pasted, where).plan
        assert row.plan.timing.period == plan.timing.period
        (made,) = {i.engine for i in plan.instances if "rollout" in i.uses}
        assert "sglang" == made
    written = by_engine({"c": COLOCATE, "s": SPLIT}, roles_with(graph, where), "sglang")
    assert tuned.best.period <= shortest(graph, written.values(), where) * (1 + 1e-9)
    assert "sglang" in tuned_text(tuned)


def roles_with(graph, where):
    return moves_of(graph, where, {}, "sglang").roles


@pytest.mark.slow
def test_beside_an_engine_the_embedded_one_is_still_found():
    """On a CPU a reshard through another process costs more than it brings."""
    where = cpu_cluster(2, threads=1, memory=1e9)
    plain = search_placements(grpo(), {"split": SPLIT}, where, limits=SearchLimits(plans=40))
    both = search_placements(grpo(), {"split": split()}, where, limits=SearchLimits(plans=40))
    assert both.best.period <= plain.best.period * 1.02
    assert ["split"] == [tried.name for _, tried in both.written]


@pytest.mark.slow
def test_a_large_search_with_an_engine_is_never_worse_than_by_hand():
    graph, where = large_batch("ppo"), parse_cluster("h100:64", 1)
    tuned = search_placements(graph, {}, where, limits=SearchLimits(engine="sglang"))
    by_hand = [
        rf.Placement(
            pools={"train": 64 - gen, "gen": gen},
            assign={"*": rf.on("train"), "actor.rollout": rf.on("gen", engine="sglang", tp=tp)},
        )
        for gen in (16, 32, 48)
        for tp in (1, 2, 4)
    ]
    assert tuned.best.period <= shortest(graph, by_hand, where) * (1 + 1e-9)
