"""Experts that lie apart, in plans: bytes and seconds by hand, notes, and what tune tries."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.modelfiles.widths import widths_of
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.layouts import shares
from rlflow.scheduler.costs.lengths import Load, ResponseLengths
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.collectives import group_of
from rlflow.scheduler.models.mixtures import FULLEST_RANK, Experts, apart_on
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.strategies import exact, graph_of

MIXTURE = known_shape("qwen3-30b-a3b")
# Layers, experts, what a token takes, width of it and inside an expert.
LAYERS, EXPERTS, CHOSEN, HIDDEN, INSIDE = 48, 128, 8, 2048, 768
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPUS = parse_cluster("h100:32", 32)


def declared() -> None:
    actor = rf.Model("actor", "shape:qwen3-30b-a3b", dtype="bfloat16", optimizer=rf.AdamW(lr=1e-6))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
    samples = ops.rollout(actor, prompts, n=8, max_new_tokens=512)
    advantages = ops.advantage("grpo", samples, ops.reward(exact, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss())


def planned(**how: int) -> Plan:
    assign = {"*": rf.on("all", **how), "actor.rollout": rf.on("all", tp=4)}
    placement = rf.Placement(pools={"all": 32}, assign=assign)
    return compile_plan(graph_of(declared, "experts"), placement, GPUS).plan


def roofline(ep: int) -> Roofline:
    devices = range(32)
    return Roofline(
        kind=GPUS.kind,
        shape=MIXTURE,
        size=2,
        gathers=True,
        trains_vocabulary=True,
        fsdp=group_of(GPUS, devices),
        ep=group_of(GPUS, devices[:ep]),
        shard=group_of(GPUS, devices[::ep]),
    )


def test_experts_are_counted_and_shared_out() -> None:
    whole, part = Experts(shape=MIXTURE), Experts(shape=MIXTURE, tp=2, ep=4)

    assert LAYERS * EXPERTS * 3 * HIDDEN * INSIDE == MIXTURE.in_experts == whole.held
    assert whole.held / 8 == part.held
    assert whole.held / 2 == part.held + part.elsewhere
    assert INSIDE == pytest.approx(whole.width)
    assert CHOSEN / EXPERTS * whole.held == whole.active
    assert 4 * 1000 * CHOSEN / EXPERTS == part.rows(1000)
    assert 0 == whole.sent == known_shape("qwen3-32b").in_experts
    # As many sets of eight experts as miss those of a rank, of all sets.
    missed = math.comb(EXPERTS - EXPERTS // 8, CHOSEN) / math.comb(EXPERTS, CHOSEN)
    assert 4 * (1 - missed) == part.met
    assert part.met * (HIDDEN + 1.5 * CHOSEN) == part.sent


def test_every_rank_along_tp_has_routers_and_gates_of_shared_experts_whole() -> None:
    assert LAYERS * EXPERTS * HIDDEN == shares(MIXTURE)["whole"] - MIXTURE.norms
    qwen2 = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64}
    widths = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    one = widths_of({**SMALL, **qwen2, **widths}, Path("config.json"))
    assert SMALL["num_hidden_layers"] * SMALL["hidden_size"] * (4 + 1) == one.routers


def test_a_forward_sends_each_token_to_its_experts_and_back_in_every_layer() -> None:
    roof, tokens = roofline(8), 4096.0
    met = Experts(shape=MIXTURE, ep=8).met
    # Once to each rank, of which a token with eight experts meets five of eight.
    assert 5 < met < 5.5
    size = tokens * met * (HIDDEN + 1.5 * CHOSEN) * 2 * FULLEST_RANK
    link = GPUS.kind.link * GPUS.kind.reached
    wait = GPUS.kind.latency + 7 * GPUS.kind.hop

    assert LAYERS * (2 * (size * 7 / 8 / link + wait) + wait) == pytest.approx(
        roof.dispatched(tokens)
    )
    assert 0.0 == roofline(1).dispatched(tokens)


def test_hidden_states_of_experts_are_read_and_written() -> None:
    """Picked, weighed and added up for each expert; those that travel as they leave and come."""
    whole, apart, dense = roofline(1), roofline(8), replace(MIXTURE, experts=0, chosen=0)
    none = replace(whole, shape=dense).between
    assert LAYERS * CHOSEN * HIDDEN * 14 == pytest.approx(whole.between - none)
    met = Experts(shape=MIXTURE, ep=8).met
    more = LAYERS * HIDDEN * (CHOSEN * FULLEST_RANK * 14 + met * 20)
    assert more == pytest.approx(apart.between - none)


def test_ranks_gather_their_own_experts_alone() -> None:
    apart, whole = roofline(8), roofline(1)
    experts = 2 * MIXTURE.in_experts

    assert whole.weights - experts * 7 / 8 == pytest.approx(apart.weights)
    layers = (2 * MIXTURE.in_experts / LAYERS) * 2
    assert layers * 7 / 8 == pytest.approx(whole.held_whole() - apart.held_whole(), abs=2)
    assert apart.gathered() < whole.gathered()
    assert apart.shared_out(4e9) < whole.shared_out(4e9)
    # A rank of all: no experts are gathered.
    assert roofline(32).gathered() < whole.gathered() / 5


def test_experts_lie_apart_where_micro_batches_are_small() -> None:
    """Gathers are by the pass, all-to-alls by the token; without a gather hidden it is the same."""
    rows = Load(rows=16, prompts=1, prompt=102, lengths=ResponseLengths(4096, 3196.0))
    trained = 2 * MIXTURE.parameters / 32

    def update(ep: int, micro: int) -> float:
        roof = replace(roofline(ep), micro_tokens=micro)
        return roof.update(rows, trained, recompute="selective")

    assert 1.1 * update(8, 4096) < update(1, 4096)
    whole = replace(roofline(1), micro_tokens=65_536)
    gathers = whole.passes(rows) * (2 * whole.gathered() + whole.shared_out(trained))
    assert update(1, 65_536) + gathers < update(8, 65_536)


def test_plans_say_what_tokens_take_to_their_experts_and_what_is_assumed() -> None:
    plan, shared = planned(ep=8), planned()
    texts = [note.text for note in plan.notes if note.rule == "experts"]

    assert 1 == len(texts)
    for words in ("ep=8 of its fsdp=32", "16 of 128 in each layer", "a step of actor.update sends"):
        assert words in texts[0]
    assert f"taken to get {FULLEST_RANK:g} times the mean" in texts[0]
    sizes = [{part.name: part.size for part in each.parts} for each in (plan, shared)]
    assert sizes[0] == sizes[1]
    assert not [note for note in shared.notes if note.rule == "experts"]


def test_rollouts_that_share_the_weights_hold_all_experts_and_their_own() -> None:
    graph = graph_of(declared, "experts")
    costs = Costs(graph=graph, cluster=GPUS, shapes={"actor": MIXTURE})
    trained = next(i for i in planned(ep=8).instances if i.trained)
    rollout = graph.node("actor.rollout")
    held = [
        dict(costs.working(rollout, replace(trained, ep=ep), 32))["gathered weights"]
        for ep in (1, 8)
    ]

    assert held[1] - held[0] == pytest.approx(2 * MIXTURE.in_experts / 8, abs=2)


def test_tune_tries_hosts_and_multiples_of_them_where_experts_and_ranks_divide() -> None:
    assert [8, 16, 32] == list(apart_on(MIXTURE, 32, 1, 8))
    assert [4, 8, 16] == list(apart_on(MIXTURE, 16, 2, 4))
    assert [8] == list(apart_on(known_shape("mixtral-8x7b"), 32, 1, 8))
    assert [] == list(apart_on(known_shape("qwen3-32b"), 32, 1, 8))
    assert [] == list(apart_on(None, 32, 1, 8))
