"""In which micro-batches ranks sum gradients: what plans choose, say and count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.test_costs_roofline import BATCH, SHARDED
from tests.scheduler.test_visiting_plans import PARAMETERS, of_7b

MINE = """
devices = "mine:8"

[kinds.mine]
base = "h200"
memory = {memory}e9
link = {link}e9
"""


def planned(devices: str = "h100:8", longest: int = 2048, **train: object) -> Plan:
    assign = {"*": rf.on("all"), "actor.train": rf.on("all", **{"recompute": True, **train})}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    graph = of_7b(longest, batch=512)
    return compile_plan(graph, placement, parse_cluster(devices, 8), name="p").plan


def note_of(plan: Plan) -> str:
    (note,) = (note.text for note in plan.notes if note.rule == "gradients")
    return note


def test_a_plan_says_what_it_would_hold_and_take_to_wait() -> None:
    plan, last = planned(gradient_sync="each"), planned(gradient_sync="last")
    actor = last.trained_instance("actor")
    assert actor.reduces_last
    assert "fsdp=8 recompute" in actor.layout()
    assert "gradient_sync=last" in actor.layout()
    assert not plan.trained_instance("actor").reduces_last
    update = dict(last.action("actor.update").cost.holds)
    waiting = update["gradients that wait for the last micro-batch"]
    assert waiting == pytest.approx(PARAMETERS * 4 * 7 / 8, rel=0.001)
    assert note_of(plan).startswith("gradients of actor@all are summed over fsdp=8 in each of ")
    assert " (gradient_sync='last') would hold 26.7 GB more and take " in note_of(plan)
    assert "once, in the last of " in note_of(last)
    assert note_of(last) in explain(last, last.action("actor.update"))
    assert planned().actions == plan.actions


def test_one_micro_batch_has_nothing_to_wait_for() -> None:
    plan = planned(longest=32)
    assert not any(note.rule == "gradients" for note in plan.notes)
    assert planned(longest=32, gradient_sync="last").action("actor.update").cost.holds == (
        plan.action("actor.update").cost.holds
    )


def test_sums_are_paid_once_for_all_micro_batches() -> None:
    """Over links so slow that nothing hides them: gathers in each, gradients in one."""
    slow = replace(SHARDED, micro_tokens=512, fsdp=replace(SHARDED.fsdp, bandwidth=1e6))
    passes, trained = slow.passes(BATCH), 1e6
    assert passes > 1
    each = slow.update(BATCH, trained, recompute=False)
    last = replace(slow, reduces_last=True).update(BATCH, trained, recompute=False)
    assert each - last == pytest.approx((passes - 1) * slow.shared_out(trained))


def test_a_plan_waits_by_itself_where_that_is_shorter_and_fits(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MINE.format(memory=140, link=8))
    plan, each = planned(str(file)), planned(str(file), gradient_sync="each")
    assert plan.trained_instance("actor").reduces_last
    assert not each.trained_instance("actor").reduces_last
    assert plan.timing is not None
    assert each.timing is not None
    assert plan.timing.period < each.timing.period
    assert "micro-batches: that holds 26.7 GB more and takes " in note_of(plan)
    assert note_of(plan).endswith(" less by estimate")
    file.write_text(MINE.format(memory=48, link=8))
    assert not planned(str(file)).trained_instance("actor").reduces_last


def test_a_plan_that_waits_is_read_back_and_others_say_nothing(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(dump_plan(planned(gradient_sync="last")))
    assert read_plan(saved).trained_instance("actor").reduces_last
    assert "reduces_last" not in planned().trained_instance("actor").as_json()


def test_an_engine_and_ranks_alone_have_no_gradients_to_sum() -> None:
    assert (
        not planned("h200:8", 32, fsdp=1, gradient_sync="last")
        .trained_instance("actor")
        .reduces_last
    )
    assign = {
        "*": rf.on("all"),
        "actor.rollout": rf.on("all", engine="sglang", gradient_sync="last"),
    }
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    with pytest.raises(PlanError, match=r"E248.*gradient_sync"):
        compile_plan(of_7b(512), placement, parse_cluster("h100:8", 8), name="p")
