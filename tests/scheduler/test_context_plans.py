"""Rows that lie on several ranks, in plans: bytes and seconds by hand, notes, what tune tries."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.placement import ContextBy
from rlflow.modelfiles.layouts.carrying import Carrying
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.ranks.row_share import RowShare
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.collectives import group_of
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import MICRO_TOKENS, Plan
from rlflow.scheduler.search.layouts import contexts_on
from rlflow.scheduler.search.remedies import other_layouts, with_remedies
from rlflow.scheduler.search.space import layouts_of, placed_uses
from tests.scheduler.strategies import exact, graph_of

MODEL = "deepseek-r1-distill-qwen-7b"
SEVEN = known_shape(MODEL)
HEADS, KEYS, WIDTH, LAYERS = 28, 4, 128, 28
GPUS = parse_cluster("h100:8", 8)
TOKENS = 16_384


def declared() -> None:
    actor = rf.Model("actor", f"shape:{MODEL}", dtype="bfloat16", optimizer=rf.AdamW(lr=1e-6))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=126_000)
    advantages = ops.advantage("grpo", samples, ops.reward(exact, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss())


def planned(devices: str = "h100:8", **how: object) -> Plan:
    count = int(devices.split(":")[1])
    cluster = parse_cluster(devices, count)
    assign = {"*": rf.on("all", **how), "actor.rollout": rf.on("all", tp=4)}
    placement = rf.Placement(pools={"all": count}, assign=assign)
    return compile_plan(graph_of(declared, "contexts"), placement, cluster).plan


@pytest.fixture
def load() -> Load:
    graph = graph_of(declared, "contexts")
    costs = Costs(graph=graph, cluster=GPUS, shapes={"actor": SEVEN})
    return costs.load(graph.node("actor.update"), 1)


def share(ranks: int, by: ContextBy, tp: int = 1) -> RowShare:
    return RowShare(shape=SEVEN, size=2, by=by, group=group_of(GPUS, range(ranks)), tp=tp)


def test_heads_go_to_ranks_and_come_back() -> None:
    four = share(4, "ulysses")
    link, wait = GPUS.kind.bus * GPUS.kind.reached, GPUS.kind.latency + 3 * GPUS.kind.hop
    sent = TOKENS * (2 * HEADS + 2 * KEYS) * WIDTH * 2 * 3 / 4

    assert sent / link + 2 * wait == pytest.approx(four.forward(TOKENS))
    assert LAYERS * sent / TOKENS == four.sent == four.sent_back
    # Seven ranks do not go into four heads of keys: each has one of them for each of its queries.
    assert [KEYS, 8, 28] == [share(ranks, "ulysses").keys for ranks in (4, 8, 7)]
    assert KEYS / 2 == share(2, "ulysses", tp=2).keys


def test_keys_and_values_go_round_and_their_gradients_after_them() -> None:
    four = share(4, "ring")
    link, wait = GPUS.kind.bus * GPUS.kind.reached, GPUS.kind.latency + GPUS.kind.hop
    passed = 2 * KEYS * WIDTH * TOKENS

    assert 3 * (2 * passed / link + wait) == pytest.approx(four.forward(TOKENS))
    wide = 4 * (4 * passed / link + wait)
    assert four.forward(TOKENS) + wide == pytest.approx(four.backward(TOKENS))
    assert 0.0 == four.waited(TOKENS, 1e9, 1, 1)
    assert LAYERS * four.forward(TOKENS) == pytest.approx(four.waited(TOKENS, 0.0, 1, 0))
    assert 0.0 == share(1, "ring").forward(TOKENS) == share(1, "ring").working


def test_heads_of_layers_that_carry_states_go_and_come_beside_those_of_attention() -> None:
    states = Carrying(layers=21, heads=16, entering=12_352, leaving=4096)
    hybrid = replace(SEVEN, without_attention=21, carrying=states)
    four = replace(share(4, "ulysses"), shape=hybrid)
    link, wait = GPUS.kind.bus * GPUS.kind.reached, GPUS.kind.latency + 3 * GPUS.kind.hop
    sent = TOKENS * (12_352 + 4096) * 2 * 3 / 4

    attended = 7 * four.forward(TOKENS)
    assert 3 * (attended + 21 * (sent / link + 2 * wait)) == pytest.approx(
        four.waited(TOKENS, 1e9, 2, 1)
    )
    assert four.sent == pytest.approx(share(4, "ulysses").sent / 4 + 21 * sent / TOKENS)
    assert 2 * 12_352 * 2 == four.working
    assert [2, 4] == list(contexts_on(hybrid, 8, 1, 8))
    assert not list(contexts_on(replace(hybrid, windows=True), 8, 8, 8))


def test_groups_that_heads_have_in_common_are_repeated_for_more_ranks() -> None:
    mamba = Carrying(layers=1, heads=48, entering=1000, leaving=600, groups=2, shared=100)

    assert [1000, 1000, 1100, 1300] == [mamba.entering_on(ranks) for ranks in (1, 2, 4, 8)]
    assert [1, 2, 4, 6, 8] == [ranks for ranks in range(1, 10) if mamba.parts(ranks)]


def roofline(ranks: int) -> Roofline:
    group = group_of(GPUS, range(ranks))
    return Roofline(kind=GPUS.kind, shape=SEVEN, size=2, cp=group, cp_by="ring", micro_tokens=8192)


def test_a_rank_has_its_part_of_the_tokens_and_of_a_row_that_is_longer(load: Load) -> None:
    one, eight = roofline(1), roofline(8)

    assert load.longest_row == one.most_tokens(load)
    assert load.longest_row / 8 == eight.most_tokens(load)
    assert [part / 8 for part in one.ending(load)][::2] == list(eight.ending(load))[::2]
    held = [dict(each.pass_holds(load, train=True, recompute=False)) for each in (one, eight)]
    assert held[0]["activations"] / 9 < held[1]["activations"] < held[0]["activations"] / 7
    assert "tokens on their way to other ranks" in held[1]


def test_rows_of_128k_tokens_fit_and_take_less_with_cp_on_8_and_64_gpus() -> None:
    for devices in ("h100:8", "h100:64"):
        whole, cut = planned(devices), planned(devices, cp=8)
        seconds = [plan.action("actor.update").cost.seconds or 0 for plan in (whole, cut)]
        assert seconds[1] < seconds[0], devices


def test_a_plan_says_how_ranks_attend_and_what_the_other_way_takes() -> None:
    said = {
        cp: next(note.text for note in planned(cp=cp).notes if note.rule == "context")
        for cp in (4, 8)
    }

    assert "cp=4 ranks" in said[4]
    assert "a step of actor.update sends" in said[4]
    assert "by estimate" in said[4]
    assert "28 heads do not divide by 8 for ulysses" in said[8]
    assert "(cp_by='ring')" in said[8]
    ways = {way: planned(cp=4, cp_by=way) for way in ("ulysses", "ring")}
    assert {f"fsdp=2 cp=4 {way}" for way in ways} <= {
        " ".join(i.layout().split()[:3]) for plan in ways.values() for i in plan.instances
    }


def test_tune_and_what_would_fit_name_cp_where_rows_are_longer_than_a_pass() -> None:
    graph, wide = graph_of(declared, "contexts"), (SEVEN, 8, 1, 8)

    assert [2, 4, 8] == list(contexts_on(*wide))
    assert [2, 4] == list(contexts_on(replace(SEVEN, windows=True), 8, 1, 8))
    (trained, _) = placed_uses(graph)
    for longest, cps in ((MICRO_TOKENS, {1}), (MICRO_TOKENS + 1, {1, 2, 4, 8})):
        found = layouts_of(trained, (0, 8), SEVEN, GPUS, longest=longest)
        assert cps == {layout.cp for layout in found}
    where = rf.on("all", fsdp=8)
    others = other_layouts("train", where, frozen=False, on_host=False, contexts=[4])
    assert rf.on("all", cp=4) in list(others)
    tight = rf.Placement(
        pools={"train": 2, "gen": 2},
        assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen", tp=2)},
    )
    with pytest.raises(PlanError) as refused:
        compile_plan(graph, tight, parse_cluster("h100:4", 4))
    told = with_remedies(refused.value, graph, tight, parse_cluster("h100:4", 4))
    assert "cp=" in str(told)
