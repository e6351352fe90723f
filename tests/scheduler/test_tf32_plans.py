"""TF32: what placements say of it, what plans print and price, and what refuses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.placement import On
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.test_visiting_plans import of_7b


def planned(assign: dict[str, On], devices: str = "h100:8", dtype: str = "float32") -> Plan:
    placement = rf.Placement(pools={"all": int(devices[-1])}, assign=assign)
    cluster = parse_cluster(devices, 1)
    return compile_plan(of_7b(512, dtype=dtype), placement, cluster, name="p").plan


def noted(plan: Plan) -> list[str]:
    return [note.text for note in plan.notes if note.rule == "tf32"]


PLAIN, TF32 = rf.on("all"), rf.on("all", tf32=True)


def test_a_use_that_says_so_is_priced_by_the_rate_of_tf32(tmp_path: Path) -> None:
    """Of the update alone: its products take less, those of rollouts and log-probs as much."""
    sharded = {"reshard_after_forward": True}
    plain, plan = (
        planned({"*": PLAIN, "actor.train": rf.on("all", **sharded, **how)})
        for how in ({}, {"tf32": True})
    )
    assert ("train",) == plan.trained_instance("actor").tf32
    trained = plan.trained_instance("actor")
    assert trained.layout().endswith(" tf32")
    assert replace(trained, uses=("train", "rollout")).layout().endswith(" tf32=train")
    assert not plan.instance("ref@all").tf32
    assert "tf32" not in plain.trained_instance("actor").as_json()
    (text,) = noted(plan)
    assert "actor@all (train)" in text
    assert "494 Tflop/s at the most instead of 67" in text
    kind = KINDS["h100"]
    for after in (action for action in plan.actions if action.kind == "run"):
        before = plain.action(after.id)
        assert before.cost.transient == after.cost.transient
        one, other = before.cost.seconds, after.cost.seconds
        assert one is not None
        assert other is not None
        if after.id == "actor.update":
            assert one / (kind.flops_tf32 / kind.flops32) < other < one
        else:
            assert one == other, after.id
    saved = tmp_path / "plan.json"
    saved.write_text(dump_plan(plan))
    assert ("train",) == read_plan(saved).trained_instance("actor").tf32
    assert planned({"*": rf.on("all", tf32=False)}).hash == planned({"*": PLAIN}).hash


def test_all_uses_print_the_word_alone() -> None:
    plan = planned({"*": TF32})
    assert plan.instance("ref@all").layout().endswith(" tf32")
    assert len(plan.instances) == len(noted(plan))


@pytest.mark.parametrize(
    ("devices", "dtype", "why"),
    [
        ("h100:8", "bfloat16", "is bfloat16, which TF32 does not change"),
        ("cpu:8@500GB", "float32", "runs on cpu, which has no TF32: nothing changes"),
        ("mi300x:8", "float32", "runs on mi300x, which has no TF32: nothing changes"),
    ],
)
def test_where_it_changes_nothing_the_plan_says_so(devices: str, dtype: str, why: str) -> None:
    place = {"pools": {"all": 8}}
    made = [
        compile_plan(
            of_7b(64, dtype=dtype),
            rf.Placement(**place, assign={"*": where}),
            parse_cluster(devices, 1),
            name="p",
        ).plan
        for where in (PLAIN, TF32)
    ]
    assert all(why in text for text in noted(made[1]))
    assert noted(made[1])
    assert [a.cost.seconds for a in made[0].actions] == [a.cost.seconds for a in made[1].actions]


def test_engines_of_their_own_refuse_it() -> None:
    assign = {"*": PLAIN, "actor.rollout": rf.on("all", engine="sglang", tf32=True)}
    with pytest.raises(PlanError, match=r"E248.*tf32"):
        planned(assign, dtype="bfloat16")


def test_a_wrong_value_is_refused_where_it_is_declared() -> None:
    with pytest.raises(Exception, match="tf32"):
        rf.on("all", tf32="high")
