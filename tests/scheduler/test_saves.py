"""What a save costs by the plan: bytes of each device, how long training waits, hosts' memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import cpu_cluster, parse_cluster
from rlflow.scheduler.plan.plan import HOST, Plan
from rlflow.scheduler.plan.saved import plan_from_json
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.strategies import graph_of
from tests.scheduler.test_visiting_plans import PARAMETERS, of_7b

SECONDS = 2.0


def planned(
    devices: int, *, graph: Graph | None = None, host: str | None = None, **on: object
) -> Plan:
    placement = rf.Placement(pools={"all": devices}, assign={"*": rf.on("all", **on)})
    cluster = parse_cluster(f"h100:{devices}", 1, host_memory=host)
    return compile_plan(graph or of_7b(512), placement, cluster, name="p").plan


def seconds_of(plan: Plan) -> float:
    """The wait that the plan's note says, of which there is one."""
    (note,) = (note.text for note in plan.notes if note.rule == "checkpoint")
    return float(note.partition("which takes ")[2].partition(" s at most")[0])


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_save_of_seven_billion_parameters_stalls_for_less_than_two_seconds(
    devices: int, dtype: str
) -> None:
    if (devices, dtype) == (2, "float32"):
        pytest.skip("does not fit")
    plan = planned(devices, graph=of_7b(512, dtype=dtype))

    (saved,) = plan.saved
    # Weight and two moments in float32, each number once, by the rank that has it.
    assert saved.size == pytest.approx(12 * PARAMETERS / devices, rel=1e-3)
    link = 64e9 * 0.8
    assert seconds_of(plan) == pytest.approx(saved.size / link, rel=0.05)
    assert seconds_of(plan) < SECONDS
    assert plan.peaks[HOST] >= devices * saved.size
    assert not verify(plan, "notes")


def test_replicas_write_a_part_each() -> None:
    whole, halves = planned(8, fsdp=8), planned(8, fsdp=4)
    assert whole.saved[0].size == pytest.approx(halves.saved[0].size, rel=1e-3)


def test_hosts_that_cannot_hold_the_copies_are_refused() -> None:
    with pytest.raises(PlanError, match="E405") as caught:
        planned(8, host="80GB")
    assert "91.4 GB copies of actor@all to be saved" in str(caught.value)


def test_it_is_part_of_the_plan_and_a_wrong_one_is_a_contradiction() -> None:
    plan = planned(8)
    assert plan_from_json(json.loads(dump_plan(plan))).saved == plan.saved
    wrong = replace(plan, saved=(replace(plan.saved[0], size=plan.saved[0].size + 8),))
    assert any("a save of actor@all copies" in line for line in verify(wrong, "notes"))


def test_plans_for_cpus_say_nothing_of_it() -> None:
    def declare() -> None:
        from rlflow import ops

        actor = rf.Model("actor", "shape:qwen2.5-0.5b", optimizer=rf.AdamW(lr=1e-6))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(judge, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    cluster = cpu_cluster(1, threads=1, memory=64e9)
    plan = compile_plan(graph_of(declare), placement, cluster, name="p").plan
    assert () == plan.saved
    assert "saved" not in plan.to_json()


def judge(response: str, answer: str) -> float:
    return float(response == answer)
