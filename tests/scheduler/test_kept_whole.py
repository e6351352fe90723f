"""Layers that stay whole from an update's forward to its backward: what placements say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.strategies import exact, graph_of
from tests.scheduler.test_visiting_plans import PARAMETERS, of_7b

KEPT = {"reshard_after_forward": False}
GATHERED = {"reshard_after_forward": True}


def planned(**train: object) -> Plan:
    assign = {"*": rf.on("all"), "actor.train": rf.on("all", **train)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    return compile_plan(of_7b(512), placement, parse_cluster("h100:8", 1), name="p").plan


def test_a_placement_says_it_of_updates_alone() -> None:
    plan, plain = planned(**KEPT), planned(**GATHERED)
    actor, ref = plan.trained_instance("actor"), plan.instance("ref@all")
    assert actor.kept_whole
    assert not ref.kept_whole
    assert "fsdp=8 reshard_after_forward=False" in actor.layout()
    gathered = [
        dict(p.action("actor.update").cost.holds)["gathered weights"] for p in (plan, plain)
    ]
    assert PARAMETERS * 2 < gathered[0] < PARAMETERS * 2.1
    assert gathered[1] < PARAMETERS * 0.5
    costs = [p.action("ref.log_probs").cost for p in (plan, plain)]
    assert costs[0] == costs[1]


def test_a_plan_without_it_says_nothing_of_it_and_one_with_it_is_read_back(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(dump_plan(planned(**KEPT)))
    assert "kept_whole" not in planned(**GATHERED).trained_instance("actor").as_json()
    assert read_plan(saved).trained_instance("actor").kept_whole


def test_where_nothing_is_shared_it_is_of_no_use() -> None:
    assign = {"*": rf.on("all"), "actor.train": rf.on("all", fsdp=1, recompute=True, **KEPT)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    cluster = parse_cluster("h200:8", 1)
    plan = compile_plan(of_7b(64), placement, cluster, name="p").plan
    assert not plan.trained_instance("actor").kept_whole


def test_an_engine_has_none() -> None:
    assign = {"*": rf.on("all"), "actor.rollout": rf.on("all", engine="sglang", **KEPT)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    with pytest.raises(PlanError, match=r"E248.*reshard_after_forward"):
        compile_plan(of_7b(512), placement, parse_cluster("h100:8", 1), name="p")


MINE = """
devices = "mine:8"

[kinds.mine]
base = "l40s"
memory = {memory}e9
"""


def beside(devices: str = "l40s:8", longest: int = 64, **train: object) -> Plan:
    """A plan of 7B over PCIe, whose ranks have two rows of few tokens for all that they gather."""
    assign = {"*": rf.on("all"), "actor.train": rf.on("all", **train)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    return compile_plan(of_7b(longest), placement, parse_cluster(devices, 1), name="p").plan


def test_a_plan_keeps_layers_whole_by_itself_where_that_is_shorter() -> None:
    """A row of some sixty tokens a device: links take longer than products."""
    chosen, gathered = beside(), beside(**GATHERED)
    assert chosen.trained_instance("actor").kept_whole
    assert not gathered.trained_instance("actor").kept_whole
    assert chosen.timing.period < gathered.timing.period
    assert chosen.actions == beside(**KEPT).actions
    (note,) = (note.text for note in chosen.notes if note.rule == "reshard")
    assert note.startswith(
        "layers of actor@all stay whole from an update's forward to its backward"
    )
    assert "(reshard_after_forward=False): an iteration is " in note
    assert note.endswith(" by estimate, and its update holds 10.2 GB more")
    assert note in explain(chosen, chosen.action("actor.update"))


def test_a_model_that_computes_forwards_too_keeps_layers_whole_in_its_update_alone() -> None:
    def declare() -> None:
        adam = rf.AdamW(lr=1e-6)
        actor, critic = (
            rf.Model(name, "shape:qwen2.5-1.5b", dtype="bfloat16", optimizer=adam, head=head)
            for name, head in (("actor", "lm"), ("critic", "value"))
        )
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=64)
        values = ops.values(critic, samples)
        advantage = ops.advantage("gae", samples, ops.reward(exact, samples), values)
        ops.update(critic, samples, advantage, values, loss=rf.ValueLoss())
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    def made(**on: object) -> Plan:
        placement = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all", **on)})
        cluster = parse_cluster("l40s:8", 1)
        return compile_plan(graph_of(declare), placement, cluster, name="p").plan

    plan, gathered = made(), made(**GATHERED)
    kept = {instance.name for instance in plan.instances if instance.kept_whole}
    assert {"actor@all", "critic@all"} == kept
    assert kept == {note.text.split()[2] for note in plan.notes if note.rule == "reshard"}
    values = [p.action("critic.values").cost for p in (plan, gathered)]
    assert values[0] == values[1]


def test_where_products_hide_the_gathers_nothing_is_chosen() -> None:
    assert not beside(longest=16_384).trained_instance("actor").kept_whole


@pytest.mark.rows(3)
@pytest.mark.parametrize("memory", [18, 22, 28, 36, 40, 42, 44, 48, 80])
def test_the_choice_costs_no_plan_its_memory_and_none_its_seconds(
    memory: int, tmp_path: Path
) -> None:
    """For devices with ever more memory: a plan whenever there is one without, and no longer."""
    file = tmp_path / "mine.toml"
    file.write_text(MINE.format(memory=memory))
    found: list[Plan | None] = []
    for said in ({}, GATHERED):
        try:
            found.append(beside(str(file), **said))
        except PlanError:
            found.append(None)
    chosen, gathered = found
    assert (chosen is None) is (gathered is None)
    if chosen is not None and gathered is not None:
        assert chosen.timing.period <= gathered.timing.period
