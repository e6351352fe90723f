"""Engines on more ranks than key-value heads: what each repeats, and where that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.engines.updates import PAGEABLE, staged_update
from rlflow.scheduler.models.quantised import spared_bytes
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.verify import STAGES, verify
from tests.scheduler.test_update_prices import STAGED, planned, reshard

# Layers, hidden size, queries, width of an expert. Both have 4 key-value heads of 128.
SIZES = {"qwen3-30b-a3b": (48, 2048, 32, 768), "qwen3-235b-a22b": (94, 4096, 64, 1536)}
WORDS, EXPERTS, HEADS, HEAD = 151_936, 128, 4, 128


def rank_parameters(name: str, tp: int) -> int:
    """Parameters on a rank by hand: norms and routers whole, a head of keys and values at least."""
    layers, hidden, queries, width = SIZES[name]
    norms = layers * (2 * hidden + 2 * HEAD) + hidden
    keys = 2 * layers * hidden * HEAD * max(HEADS // tp, 1)
    others = 2 * hidden * queries * HEAD + EXPERTS * 3 * hidden * width
    return norms + layers * hidden * EXPERTS + keys + (2 * WORDS * hidden + layers * others) // tp


def in_engine(plan: Plan, engine: str) -> tuple[int, float]:
    """Bytes of weights on a device, and of a token in the pool there."""
    instance = plan.instance(f"actor@gen/{engine}")
    weights, pool = (dict(plan.part(part).holds) for part in (instance.weights, instance.pool_part))
    tokens = instance.engine_plan.settings.max_total_tokens
    assert tokens is not None
    return weights["weights"], pool["keys and values"] / tokens


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", SIZES)
def test_ranks_beyond_the_heads_have_a_head_each(name: str, engine: str) -> None:
    plans = {tp: planned(name, "h100:32", engine, tp=tp, gen=16) for tp in (2, 4, 8)}
    found = {tp: in_engine(plan, engine) for tp, plan in plans.items()}
    layers = SIZES[name][0]
    for tp, (weights, token) in found.items():
        assert 2 * rank_parameters(name, tp) == weights
        assert 2 * 2 * layers * HEAD * max(HEADS // tp, 1) == token
        assert not verify(plans[tp], STAGES[-1])
    assert found[2] > found[4] > found[8]
    # Each replica is brought all weights once, however many of its ranks have the same ones.
    moved = {(reshard(plan).cost.moved or 0) * tp for tp, plan in plans.items()}
    assert {16 * 2 * known_shape(name).parameters} == moved


def test_an_update_through_the_host_is_loaded_as_often_as_it_is_held() -> None:
    name, cluster = "qwen3-30b-a3b", parse_cluster("h100:32@2000GB", 1)
    plan = planned(name, "h100:32", STAGED, tp=8, gen=16)
    costs = Costs(graph=plan.graph, cluster=cluster, shapes={"actor": known_shape(name)})
    stages = staged_update(plan.instance("actor@train"), plan.instance("actor@gen/sglang"), costs)
    # Of 48 layers keys and values of half a head beyond an equal share, in bfloat16.
    repeated = 2 * 48 * 2 * 2048 * 128 // 2
    load = 2 * known_shape(name).parameters / 8 + repeated
    assert pytest.approx(load / PAGEABLE) == dict(stages.beside)["the load"]


def test_work_and_bytes_of_a_rank_count_what_is_repeated() -> None:
    shape = known_shape("qwen3-30b-a3b")
    assert [0, 0, 0, 48 * 2048 * 128] == [shape.repeated_keys(tp) for tp in (1, 2, 4, 8)]
    assert [0.0, 0.5, 0.75] == [shape.repeated_heads(tp) for tp in (4, 8, 16)]
    latent = known_shape("deepseek-v3")
    assert {latent.cached} == {latent.cached_on_each(tp) for tp in (1, 8, 128)}
    # Of 61 layers of 7168 the maps to 1536 and to 512 + 64 numbers are on every rank.
    maps = 61 * 7168 * (1536 + 512 + 64)
    assert [0, maps * 7 // 8] == [latent.repeated_keys(tp) for tp in (1, 8)]


def test_a_repeated_head_spares_its_bytes_in_float8() -> None:
    """Of 7B: 28 layers of 3584, 4 heads of 128; every rank of 8 has a head's k and v."""
    shape = known_shape("qwen2.5-7b")
    cut = 28 * (2 * 3584 * 3584 + 3 * 3584 * 18944) // 8 + 28 * 2 * 3584 * 128
    assert cut - cut // (128 * 128) * 4 == spared_bytes(shape, 2, ranks=8)


@pytest.mark.parametrize(
    ("name", "engine", "wrong", "fix"),
    [
        ("qwen3-30b-a3b", None, "the key-value heads", 'engine="sglang", tp=8)'),
        ("qwen2.5-7b", None, "the heads and the key-value heads", 'rf.on("gen", tp=4)'),
        ("qwen2.5-7b", "sglang", "the heads", 'engine="sglang", tp=4)'),
    ],
)
def test_what_cannot_be_cut_is_told_what_can(
    name: str, engine: str | None, wrong: str, fix: str
) -> None:
    with pytest.raises(PlanError) as found:
        planned(name, "h100:32", engine, tp=8, gen=16)
    (finding,) = found.value.findings
    assert ("E213", True) == (finding.code, finding.what.endswith(f"{wrong} of shape:{name}"))
    assert finding.fix.startswith('"actor.rollout": ')
    assert finding.fix.endswith(fix)
    can = "engines in processes of their own repeat" in finding.expected
    assert can is (name == "qwen3-30b-a3b")


def test_training_says_that_engines_can_and_stays_with_the_heads() -> None:
    cluster = parse_cluster("h100:8@2000GB", 1)
    plan = planned("qwen3-30b-a3b", "h100:8", "sglang", tp=8)
    where = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all", tp=8)})
    with pytest.raises(PlanError) as found:
        compile_plan(plan.graph, where, cluster)
    (finding,) = found.value.findings
    assert ("E213", '"actor": rf.on("all", tp=4)') == (finding.code, finding.fix)
    assert "engines in processes of their own repeat" in finding.expected


@pytest.mark.parametrize("heads", [1, 2])
def test_the_verifier_takes_plans_of_small_models_whose_ranks_repeat_much(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a feed-forward layer is as narrow as the queries a third of a rank is repeated."""
    small = replace(
        known_shape("qwen2.5-0.5b"),
        parameters=2 * (2 * 256 * 256 + 2 * 256 * heads * 32 + 3 * 256 * 256) + 64 * 256,
        **{"embedding": 64 * 256, "layers": 2, "hidden": 256, "heads": 8, "kv_heads": heads},
        **{"head_dim": 32, "ffn": 256, "vocab": 64, "norms": 0, "matrices": ()},
    )
    monkeypatch.setattr("rlflow.scheduler.compile.model_shape", lambda *_: small)
    plan = planned("qwen2.5-0.5b", "cpu:16", "sglang", tp=8, gen=8)
    part = plan.part("actor@gen/sglang/weights")
    cut = 2 * 5 * 256 * 256 + 64 * 256
    assert 2 * (cut // 8 + 2 * 2 * 256 * 32) == part.size
    sizes = (part.size or 0) // 2, (part.size or 0) * 2
    for size in sizes:
        wrong = tuple(replace(p, size=size) if p is part else p for p in plan.parts)
        assert verify(replace(plan, parts=wrong), STAGES[-1])
