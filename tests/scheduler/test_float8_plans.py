"""Plans of engines that hold linear layers in 8-bit floats: bytes, seconds, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler.engines.updates import BEGIN
from rlflow.scheduler.models.quantised import misfits_blocks, spared_bytes
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import STAGES, verify
from tests.scheduler.test_update_prices import planned, reshard, seconds

FLOAT8 = rf.SGLang(quantization="fp8")
# Of Qwen2.5 7B: 28 layers of 3584, 28 heads and 4 of keys of 128, and 18944 inside.
LINEAR = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)


def test_a_number_takes_a_byte_and_a_block_a_scale() -> None:
    shape = known_shape("qwen2.5-7b")
    spared = LINEAR - LINEAR // (128 * 128) * 4
    assert (spared, spared // 2) == tuple(spared_bytes(shape, 2, ranks) for ranks in (1, 2))
    plain, low = (planned("qwen2.5-7b", "h100:8", e, gen=4) for e in ("sglang", FLOAT8))
    name = "actor@gen/sglang"
    parts = [dict(plan.part(f"{name}/weights").holds)["weights"] for plan in (plain, low)]
    assert spared == parts[0] - parts[1]
    moved = [reshard(plan).cost.moved or 0 for plan in (plain, low)]
    assert 4 * spared == moved[0] - moved[1]
    assert ["float8" in plan_text(plan) for plan in (plain, low)] == [False, True]
    hosts = [plan.part(f"{name}/weights").on_host for plan in (plain, low)]
    assert spared == hosts[0] - hosts[1]


@pytest.mark.parametrize(("devices", "gen", "tp"), [("h100:8", 4, 1), ("h100:8", 0, 2)])
def test_an_update_takes_about_half_of_what_the_load_takes(devices: str, gen: int, tp: int) -> None:
    plain, low = (
        planned("qwen2.5-7b", devices, engine, gen=gen, tp=tp) for engine in ("sglang", FLOAT8)
    )
    assert 0.5 < (seconds(low) - BEGIN) / (seconds(plain) - BEGIN) < 0.65
    assert not verify(low, STAGES[-1])
    (buckets, scratch) = reshard(low).cost.holds
    assert (buckets,) == reshard(plain).cost.holds
    assert ("what is quantised", 512 << 20) == scratch
    rollouts = [plan.action("actor.rollout") for plan in (plain, low)]
    assert (rollouts[1].cost.seconds or 0) < (rollouts[0].cost.seconds or 0)


def test_a_plan_with_other_bytes_is_refused() -> None:
    plan = planned("qwen2.5-7b", "h100:8", FLOAT8, gen=4)
    action = reshard(plan)
    for moved in (action.cost.moved or 0) // 3, (action.cost.moved or 0) * 2:
        cost = replace(action.cost, moved=moved)
        wrong = tuple(replace(a, cost=cost) if a is action else a for a in plan.actions)
        assert verify(replace(plan, actions=wrong), STAGES[-1])


def test_weights_in_float8_come_by_the_device_on_a_cpu_too() -> None:
    plan = planned("qwen2.5-0.5b", "cpu:2", FLOAT8, gen=1)
    assert "broadcast" == reshard(plan).transport
    assert not verify(plan, STAGES[-1])
    assert "buckets on its devices" in plan_text(plan)


@pytest.mark.parametrize(
    ("options", "shape", "tp", "said"),
    [
        ({"updates": "memory"}, "qwen2.5-7b", 1, "updates='memory'"),
        ({}, "qwen2.5-0.5b", 2, "queries of 448"),
        ({"speculative": rf.Speculative(algorithm="NGRAM", draft_tokens=3)}, "qwen2.5-7b", 1, "it"),
    ],
)
def test_what_cannot_be_held_so_is_refused(
    options: dict[str, object], shape: str, tp: int, said: str
) -> None:
    with pytest.raises(PlanError, match=rf"E679(.|\n)*{said}"):
        planned(shape, "h100:2", rf.SGLang(quantization="fp8", **options), tp=tp)


def test_adapters_stay_as_they_are_above_layers_in_float8() -> None:
    plan = planned("qwen2.5-7b", "h100:8", FLOAT8, gen=4, lora=rf.LoRA(rank=8))
    assert "collective" == reshard(plan).transport
    assert not verify(plan, STAGES[-1])


def test_ranks_have_whole_blocks() -> None:
    shape = known_shape("qwen2.5-7b")
    assert ["", ""] == [misfits_blocks(shape, ranks) for ranks in (1, 4)]
    assert "the feed-forward layer" in misfits_blocks(shape, 7)
    assert "experts" in misfits_blocks(replace(shape, experts=8), 1)
