"""Roles, ranges and layouts; bounds that no plan undercuts; placements that can be pasted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import cpu_cluster, parse_cluster
from rlflow.scheduler.models.shapes import known_shape, model_shape
from rlflow.scheduler.search.bounds import Figures, PeriodBounds
from rlflow.scheduler.search.candidates import Moves
from rlflow.scheduler.search.known_costs import KnownCosts
from rlflow.scheduler.search.layouts import Layout, ways_to_train
from rlflow.scheduler.search.ranges import cut_points, divisions, near_cuts, pattern, unions
from rlflow.scheduler.search.space import (
    MOST_COMBINATIONS,
    Candidate,
    Choice,
    PlacedUse,
    classes_of,
    hand_written,
    layouts_of,
    placed_uses,
    placement_of,
    role_instance,
    scaled,
)
from rlflow.scheduler.search.text import placement_source
from rlflow.scheduler.search.tune import _rewritten
from tests.scheduler.examples import HYBRID, MESH, SPLIT, TWICE, grpo, ppo
from tests.scheduler.looping import dapo
from tests.scheduler.strategies import exact, graph_of
from tests.scheduler.test_averages import ema


def gpus(count):
    return parse_cluster(f"h100:{count}", count)


def shape_of(heads, kv_heads):
    """A shape of which only what tensor parallelism divides matters."""
    shape = model_shape(rf.Model("m", "shape:qwen2.5-7b"))
    changed = {"heads": heads, "kv_heads": kv_heads, "ffn": 1024}
    return type(shape)(**{name: getattr(shape, name) for name in shape.__slots__} | changed)


def role(*, trained=False, rollout=False, source=None, key="m"):
    return PlacedUse(key=key, model="m", nodes=(), trained=trained, rollout=rollout, source=source)


def test_roles_are_what_trains_and_what_samples():
    found = [(r.key, [n.name for n in r.nodes], r.trained, r.source) for r in placed_uses(ppo())]

    assert [
        ("actor", ["actor.update"], True, None),
        ("actor.rollout", ["actor.rollout"], False, 0),
        ("ref", ["ref.log_probs"], False, None),
        ("critic", ["critic.values", "critic.update"], True, None),
    ] == found


def test_few_devices_are_cut_everywhere_many_at_eighths():
    assert (1, 2, 3) == cut_points(cpu_cluster(4))
    assert (2, 4, 8, 16, 24, 32, 40, 48, 56, 60, 62) == cut_points(gpus(64))
    assert 32 in cut_points(gpus(1024))
    assert len(cut_points(gpus(1024))) < 15


def test_kinds_meet_at_a_cut_and_share_no_range():
    where = parse_cluster("h100:16,a100:8", 24)

    assert 16 in cut_points(where)
    for division in divisions(where):
        assert all(stop <= 16 or start >= 16 for start, stop in unions(division, where))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 12, 64, 100])
def test_divisions_cover_all_devices_in_order(count):
    found = list(divisions(cpu_cluster(count)))

    assert len(found) == len(set(found))
    for division in found:
        assert (0, count) == (division[0], division[-1])
        assert sorted(set(division)) == list(division)


@pytest.mark.parametrize("point", [2, 4, 24, 48, 62])
def test_near_cuts_lie_on_both_sides(point):
    found = near_cuts(point, gpus(64))

    assert point not in found
    assert all(0 < cut < 64 for cut in found)
    assert min(found) < point < max(found) or point in (2, 62)


def test_tensor_parallelism_divides_heads_and_stays_in_a_host():
    def tps(where, heads=28, kv_heads=4, cluster=None):
        shape = shape_of(heads, kv_heads)
        found = layouts_of(role(rollout=True, source=0), where, shape, cluster or gpus(64))
        return [layout.tp for layout in found]

    assert [1, 2, 4] == tps((0, 64))
    assert [1, 2, 4, 8] == tps((0, 64), heads=32, kv_heads=8)
    assert [1] == tps((0, 64), heads=7, kv_heads=7)
    assert [1, 2] == tps((2, 64))
    assert [1] == tps((0, 63))
    assert [1, 2, 4] == tps((4, 60), heads=32, kv_heads=8)


def test_engines_have_ranks_beyond_key_value_heads_and_nothing_else_has():
    def tps(shape, *, engines=(None,), trained=False):
        use = replace(role(trained=trained, rollout=not trained, source=0), engines=engines)
        return [(each.tp, each.engine) for each in layouts_of(use, (0, 64), shape, gpus(64))]

    few = shape_of(32, 4)
    both = tps(few, engines=(None, rf.SGLang()))
    assert [1, 2, 4] == [tp for tp, engine in both if not engine]
    assert [1, 2, 4, 8, 16, 32] == [tp for tp, engine in both if engine]
    assert [1, 2, 4, 8] == [tp for tp, _ in tps(few, engines=(rf.VLLM(),))]
    assert [1, 2, 4] == sorted({tp for tp, _ in tps(few, trained=True)})
    # Neither a divisor nor a multiple, and heads that do not divide.
    assert [1] == [tp for tp, _ in tps(shape_of(24, 3), engines=(rf.VLLM(),))]
    assert [1, 2, 4] == [tp for tp, _ in tps(shape_of(28, 4), engines=(rf.VLLM(),))]


def test_training_shards_over_all_a_host_or_not_at_all():
    found = {
        (layout.fsdp, layout.tp)
        for layout in layouts_of(role(trained=True), (0, 32), shape_of(28, 2), gpus(64))
    }

    assert {(32, 1), (8, 1), (1, 1), (16, 2), (4, 2), (1, 2)} == found


def test_engines_are_on_whole_hosts_where_they_are_on_several():
    use = replace(role(rollout=True, source=0), engines=(rf.SGLang(),))

    def tps(start, stop):
        return {each.tp for each in layouts_of(use, (start, stop), shape_of(32, 4), gpus(64))}

    assert {1, 2, 4, 8, 16, 32} == tps(0, 64)
    assert {1, 2, 4, 8, 16} == tps(8, 24)
    assert {1, 2, 4} == tps(4, 36)


def test_stages_are_on_whole_hosts_and_experts_apart_within_them():
    mixture, dense = known_shape("deepseek-v3"), known_shape("llama-3.1-70b")

    def found(shape, where, staged=True):
        made = layouts_of(role(trained=True), where, shape, gpus(256), staged=staged)
        return {each.sizes for each in made if each.pp > 1}

    assert found(dense, (0, 64), staged=False) == found(dense, (4, 68)) == set()
    sizes = {(8 * hosts, 1, 1, 1, 8 // hosts) for hosts in (1, 2, 4)}
    assert sizes | {(hosts, 8, 1, 1, 8 // hosts) for hosts in (1, 2, 4)} == found(dense, (0, 64))
    assert {(16, 1, 8, 1, 16), (16, 1, 16, 1, 16)} == {
        each for each in found(mixture, (0, 256)) if each[1] == 1 and each[-1] == 16
    }
    for fsdp, tp, ep, _, pp in found(mixture, (64, 256)):
        assert fsdp * tp * pp == 192
        assert fsdp % ep == 0


@pytest.mark.parametrize("cut", [{"pp": 2}, {"cp": 2}])
def test_rollouts_share_weights_that_lie_whole_where_those_in_stages_are_faster(cut, monkeypatch):
    moves = workshop(grpo(kl_coef=0.0), cpu_cluster(4, threads=1, memory=1e9))
    figures = moves.figures
    whole, staged = (Choice(0, 4, layout) for layout in (Layout(fsdp=4), Layout(fsdp=2, **cut)))
    slow = figures.of(0, whole)
    fast = replace(slow, busy=slow.busy / 2, seconds=tuple(s / 2 for s in slow.seconds))
    figures._known[0, staged] = fast
    offered = (whole, staged)
    monkeypatch.setattr(figures, "options", lambda *_: offered)
    monkeypatch.setattr(figures, "with_ways", lambda _, choices: choices)

    assert (staged, whole) == figures.fitting(0, (0, 4))
    apart = Candidate((staged, Choice(0, 4, Layout())))
    shared = Candidate((whole, Choice(0, 4, Layout(fsdp=4))))
    assert shared == moves._sharing(apart)


@pytest.mark.parametrize("on_host", [True, False])
def test_training_has_other_ways_in_a_layout(on_host):
    shared = [way.describe() for way in ways_to_train(Layout(fsdp=8), on_host=on_host)]
    alone = [way.describe() for way in ways_to_train(Layout(), on_host=on_host)]
    words = ["recompute=selective", "recompute"]
    hosted = ["offload=optimizer", *(f"{word} offload=optimizer" for word in words)]
    expected = [*words, *([] if on_host else hosted)]

    assert [f"fsdp=1 tp=1 {word}" for word in expected] == alone
    kept = "reshard_after_forward=False"
    assert [f"fsdp=8 tp=1 {word}" for word in (kept, *expected)] == shared


def test_a_way_is_worth_a_look_where_none_is_as_fast_and_as_small():
    graph, where = grpo(every=0), cpu_cluster(4, threads=1, memory=1e9)
    figures = workshop(graph, where).figures
    found = figures.fitting(0, (0, 1))
    sizes = [(figures.of(0, c).busy, figures.of(0, c).held, figures.of(0, c).need) for c in found]

    assert any(choice.layout.recomputes for choice in found)
    assert sorted(sizes) == sizes
    for one, other in itertools.combinations(sizes, 2):
        assert not all(a <= b for a, b in zip(one, other, strict=True))
    every = figures.with_ways(0, figures.options(0, (0, 1)))
    assert set(found) <= set(every)


def test_only_frozen_models_stay_on_the_host():
    def offloads(made):
        return any(x.offload for x in layouts_of(made, (0, 4), shape_of(4, 2), cpu_cluster(4)))

    assert offloads(role())
    assert not offloads(role(trained=True))
    assert not offloads(role(rollout=True, source=0))


def test_many_roles_go_together_until_combinations_are_few():
    few = (role(trained=True), role(rollout=True, source=0), role())
    many = tuple(role(trained=n % 3 == 0, rollout=n % 3 == 1, key=f"m{n}") for n in range(12))

    assert ((0,), (1,), (2,)) == classes_of(few, 6)
    assert 3 == len(classes_of(many, 6))
    assert set(range(12)) == {r for group in classes_of(many, 6) for r in group}
    assert 6 ** len(classes_of(many, 6)) <= MOST_COMBINATIONS


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ([{0, 1}, {0, 1}], "="),
        ([{0}, {0, 1}], "<"),
        ([{0, 1}, {1}], ">"),
        ([{0}, {1}], "|"),
        ([{0, 1}, {1, 2}], "x"),
        ([{0}, {0}, {1}], "=||"),
    ],
)
def test_patterns(devices, wanted):
    assert wanted == pattern(devices)


def test_larger_pools_keep_their_order_and_layouts():
    twice = scaled(HYBRID, 2)

    assert {"train": [0, 1, 2, 3], "gen": [2, 3, 4, 5]} == twice.pools
    assert HYBRID.assign == twice.assign
    assert {"train": 3, "gen": 3} == scaled(SPLIT, 3).pools
    assert {"split", "split x4"} == set(hand_written({"split": SPLIT}, 8))
    assert {"split"} == set(hand_written({"split": SPLIT}, 3))


def evaluated(placement):
    return eval(placement_source(placement), {"rf": rf})


@pytest.mark.parametrize(
    "placement",
    [
        SPLIT,
        HYBRID,
        MESH,
        TWICE,
        rf.Placement(pools={"a": list(range(3, 40)), "b": [5, 1]}, assign={"*": rf.on("a")}),
        rf.Placement(pools={"a": 2}, assign={"*": rf.on("a")}, staleness=0, stream="auto"),
        rf.Placement(pools={"a": 2}, assign={"*": rf.on("a")}, staleness=3, stream=4),
    ],
)
def test_pasted_it_is_the_same(placement):
    again = evaluated(placement)

    assert placement == again
    assert "staleness" in again.model_fields_set or "staleness" not in placement.model_fields_set
    assert "\n" not in placement_source(placement)


def workshop(graph, where):
    """Figures, bounds and moves of a graph on a cluster."""
    shapes = {model.name: model_shape(model) for model in graph.models}
    costs = KnownCosts(graph=graph, cluster=where, shapes=shapes)
    plan = _rewritten(graph, where, costs)
    figures = Figures(plan, costs, placed_uses(plan.graph))
    bounds = PeriodBounds(plan.graph, figures)
    return Moves(figures=figures, bounds=bounds, cluster=where, staleness=2, streams=(1, 2, 4))


def heavy():
    """An average that takes longer than the updates: one token of each prompt is learnt from."""

    def declare():
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ema = rf.Model("ema", "models/mid", optimizer=rf.Average())
        other = rf.Model("other", "models/mid", optimizer=rf.Average())
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(ema, prompts, n=2, max_new_tokens=1)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        near = ops.log_probs(other, samples)
        ops.update(actor, samples, advantage, near, loss=rf.PolicyLoss(kl_coef=0.1))
        ops.average(ema, actor)
        ops.average(other, actor, every=2)

    return graph_of(declare)


AVERAGED = {
    "ema": ema,
    "ema every 3": lambda: ema(every=3, updates=2),
    "ema unread": lambda: ema(kl_coef=0.0),
    "two": heavy,
}
BUILT = {"grpo": grpo, "ppo": ppo, **AVERAGED}


@pytest.mark.rows(2)
@pytest.mark.parametrize("build", BUILT)
def test_no_plan_is_shorter_than_its_bound(build):
    graph, where = BUILT[build](), cpu_cluster(4, threads=1, memory=1e9)
    moves = workshop(graph, where)
    found = sorted(moves.promising())
    candidates = {c for _, c in found[:: 1 + len(found) // 20]}
    first = found[0][1]
    candidates |= set(list(moves.neighbours(first))[::5])
    compiled = 0
    for candidate in sorted(candidates):
        try:
            placement = placement_of(candidate, moves.roles)
            plan = compile_plan(graph, placement, where, verified=False).plan
        except PlanError:
            continue
        compiled += 1
        assert moves.bounds.resource(candidate) <= plan.timing.resource_bound * (1 + 1e-9)
        assert moves.bounds.period(candidate) <= plan.timing.period * (1 + 1e-9)
        for role, choice in enumerate(candidate.choices):
            figure = moves.figures.of(role, choice)
            assert figure.why is None
            assert figure.need <= min(plan.peaks[d] for d in range(*choice.range))

    assert compiled > 10


@pytest.mark.parametrize("build", AVERAGED)
def test_an_average_counts_where_its_model_is_trained(build):
    """As the plan estimates it: its seconds, and both models' weights beside each other."""
    graph, where = AVERAGED[build](), cpu_cluster(4, threads=1, memory=1e9)
    moves = workshop(graph, where)
    role = next(n for n, role in enumerate(moves.roles) if role.key == "actor")
    taken = [node.name for node in moves.roles[role].averages]
    assert [node.name for node in graph.nodes if node.averages] == taken
    for layout in (Layout(), Layout(fsdp=2), Layout(tp=2, recompute=True)):
        choice = Choice(0, 2, layout)
        rest = [Choice(0, 4, Layout())] * len(moves.roles)
        rest[role] = choice
        placement = placement_of(Candidate(tuple(rest)), moves.roles)
        plan = compile_plan(graph, placement, where, verified=False).plan
        seconds = moves.figures.of(role, choice).seconds[-len(taken) :]
        assert [plan.action(name).cost.seconds for name in taken] == list(seconds)


def test_an_average_is_in_the_bounds_of_time_and_of_memory():
    graph, where = heavy(), cpu_cluster(4, threads=1, memory=1e9)
    moves = workshop(graph, where)
    names = [role.key for role in moves.roles]
    apart = Choice(2, 4, Layout())
    choices = [apart] * len(names)
    choices[names.index("actor")] = Choice(0, 2, Layout(fsdp=2))
    figure = moves.figures.of(names.index("actor"), choices[names.index("actor")])
    update, *averages = figure.seconds

    assert 2 == len(averages)
    assert figure.busy == pytest.approx(update + sum(averages))
    sampled = moves.figures.of(names.index("ema"), apart).seconds[0]
    assert moves.bounds.recurrence(Candidate(tuple(choices))) > sampled + update + averages[0]


def test_the_next_update_waits_for_an_average_however_late_rollouts_are():
    graph, where = ema(kl_coef=0.0), cpu_cluster(4, threads=1, memory=1e9)
    moves = workshop(graph, where)
    assert ["actor", "actor.rollout"] == [role.key for role in moves.roles]
    apart = (Choice(0, 2, Layout(fsdp=2)), Choice(2, 4, Layout()))
    update, average = moves.figures.of(0, apart[0]).seconds
    late = moves.bounds.recurrence(Candidate(apart, staleness=99))

    assert average > 0
    assert late == pytest.approx(update + average)


def test_both_weights_have_to_fit_where_an_average_is_taken():
    """With adapters the update keeps little beside the weights, and an average of two is more."""

    def declare():
        options = {"lora": rf.LoRA(rank=1), "dtype": "float32"}
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3), **options)
        mean = rf.Model("mean", "models/mid", optimizer=rf.Average(), **options)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=1)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=1)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        near = ops.log_probs(mean, samples)
        ops.update(actor, samples, advantage, near, loss=rf.PolicyLoss(kl_coef=0.1))
        ops.average(mean, actor)

    graph, choice = graph_of(declare), Choice(0, 1, Layout())
    needs = workshop(graph, cpu_cluster(1, threads=1, memory=1e9)).figures.of(0, choice)
    assert "mean.average" == needs.at
    short = workshop(graph, cpu_cluster(1, threads=1, memory=needs.need - 1)).figures
    assert ("memory", "mean.average") == (short.of(0, choice).why, short.of(0, choice).at)
    exact_fit = workshop(graph, cpu_cluster(1, threads=1, memory=needs.need)).figures
    assert exact_fit.of(0, choice).why is None


def test_the_chain_from_update_to_update_is_shared_by_the_lag_and_cut_by_chunks():
    graph, where = grpo(every=0), cpu_cluster(4, threads=1, memory=1e9)
    moves = workshop(graph, where)
    figures, bounds = moves.figures, moves.bounds
    apart = (Choice(0, 2, Layout(fsdp=2)), Choice(2, 4, Layout()), Choice(2, 4, Layout(fsdp=2)))
    update, rollout, ref = (figures.of(n, choice).seconds[0] for n, choice in enumerate(apart))
    host = {
        name: figures.costs.run(figures.plan.graph.node(name), None, 1).seconds
        for name in ("prompts", "reward", "advantage")
    }
    judged = max(ref, host["reward"] + host["advantage"])
    beside = max(ref / 4, (host["reward"] + host["advantage"]) / 4)

    chain = rollout + judged + update
    assert chain == pytest.approx(bounds.recurrence(Candidate(apart)))
    late = bounds.recurrence(Candidate(apart, staleness=1))
    assert max(chain / 2, update) == pytest.approx(late)
    assert rollout / 4 + beside + update == pytest.approx(
        bounds.recurrence(Candidate(apart, stream=4))
    )


def test_a_candidate_is_compiled_as_it_says():
    graph, where = ppo(), cpu_cluster(4, threads=1, memory=1e9)
    roles = workshop(graph, where).roles
    candidate = Candidate(
        (
            Choice(0, 2, Layout(fsdp=2, selective=True, kept_whole=True, hosted=True)),
            Choice(0, 4, Layout(tp=2)),
            Choice(2, 4, Layout(offload=True)),
            Choice(2, 4, Layout(fsdp=1, tp=2)),
        ),
        staleness=1,
        stream=2,
    )
    placement = placement_of(candidate, roles)
    plan = compile_plan(graph, placement, where).plan

    assert {
        "actor@train_actor": "fsdp=2 recompute=selective reshard_after_forward=False "
        "offload=optimizer",
        "actor@gen": "tp=2 x2",
        "critic@train_critic": "tp=2",
        "ref@train_critic": "x2 offload=layers",
    } == {i.name: i.layout() for i in plan.instances}
    assert (1, 2) == (placement.staleness, placement.stream)


def test_rollouts_share_trained_weights_unless_they_want_their_own():
    graph, where = grpo(kl_coef=0.0), cpu_cluster(2, threads=1, memory=1e9)
    roles = workshop(graph, where).roles
    train = Choice(0, 2, Layout(fsdp=2))

    def instances(layout):
        placement = placement_of(Candidate((train, Choice(0, 2, layout))), roles)
        return [i.name for i in compile_plan(graph, placement, where).plan.instances]

    assert ["actor@all"] == instances(Layout(fsdp=2))
    assert ["actor@all", "actor@all/rollout"] == instances(Layout(fsdp=2, own=True))
    assert ["actor@all", "actor@all/rollout"] == instances(Layout())


@pytest.mark.parametrize("where", [cpu_cluster(4, threads=1), gpus(32)])
def test_remembered_costs_are_the_costs(where):
    """Also of devices of other hosts than were asked for first, and of two on different ones."""
    graph = ppo()
    figures = workshop(graph, where).figures
    known = figures.costs
    plain = Costs(graph=figures.plan.graph, cluster=where, shapes=known.shapes)
    ranges = [(0, 4), (0, 2), (1, 3)] if where.is_cpu else [(0, 8), (8, 16), (12, 16), (8, 24)]
    asked = 0
    for number, made in enumerate(figures.roles):
        for choice in (c for at in ranges for c in figures.fitting(number, at)[:2]):
            figure, instance = figures.of(number, choice), role_instance(made, choice)
            assert figure.busy <= sum(figure.seconds)
            for node in made.nodes:
                parts = instance.row_parts
                assert plain.run(node, instance, parts) == known.run(node, instance, parts)
                assert plain.working(node, instance, parts) == known.working(node, instance, parts)
            for what in ("weights", "gradients", "moments"):
                assert getattr(plain, what)(instance) == getattr(known, what)(instance)
            first = role_instance(made, Choice(0, 2, Layout(fsdp=2)))
            for ends in ((first, instance), (instance, first)):
                sizes = [each.resharded(*ends, in_place=False) for each in (plain, known)]
                assert sizes[0] == sizes[1]
            asked += 1
    assert asked > 10
    alone = [
        Figures(figures.plan, known, figures.roles)._figure(made, choice)
        for choice in figures.fitting(0, ranges[-1])[:1]
        for made in figures.roles[:1]
    ]
    assert alone == [figures.of(0, figures.fitting(0, ranges[-1])[0])]


def test_trips_of_loops_are_costed_once_for_all_plans(monkeypatch):
    asked: list[str] = []
    run = Costs.run

    def counted(costs, node, *rest):
        asked.append(node.name)
        return run(costs, node, *rest)

    monkeypatch.setattr(Costs, "run", counted)
    graph, where = dapo(at_most=4), cpu_cluster(2)
    shapes = {model.name: model_shape(model) for model in graph.models}
    costs = KnownCosts(graph=graph, cluster=where, shapes=shapes)

    plans = [compile_plan(graph, SPLIT, where, costs=costs, verified=False).plan for _ in range(2)]

    assert "actor.rollout#4" in asked
    assert len(set(asked)) == len(asked) == len(plans[0].graph.nodes)
    assert plans[0].hash == plans[1].hash == compile_plan(graph, SPLIT, where).plan.hash
