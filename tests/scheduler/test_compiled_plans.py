"""Compiled layers: what placements say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.test_visiting_plans import of_7b, planned


def test_updates_and_log_probs_are_compiled_and_priced_as_they_are(tmp_path: Path) -> None:
    plain, plan = planned(512), planned(512, compile=True)
    assert plan.trained_instance("actor").compiled
    assert plan.instance("ref@all").compiled
    assert not plan.instance("actor@all/rollout").compiled
    assert "compile" in plan.trained_instance("actor").layout()
    assert [a.cost.seconds for a in plan.actions] == [a.cost.seconds for a in plain.actions]
    assert "compiled" not in plain.trained_instance("actor").as_json()
    saved = tmp_path / "plan.json"
    saved.write_text(dump_plan(plan))
    assert read_plan(saved).trained_instance("actor").compiled
    assert planned(512, compile=False).hash == plain.hash


@pytest.mark.parametrize("how", [{"tp": 2}, {"offload": "layers"}], ids=str)
def test_what_is_cut_or_comes_and_goes_is_refused(how: dict[str, object]) -> None:
    assign = {"*": rf.on("all"), "ref": rf.on("all", compile=True, **how)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    with pytest.raises(PlanError, match=r"E254.*ref@all"):
        compile_plan(of_7b(512), placement, parse_cluster("h100:8", 1), name="p")


def test_an_engine_compiles_by_its_own_options() -> None:
    assign = {"*": rf.on("all"), "actor.rollout": rf.on("all", engine="sglang", compile=True)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    with pytest.raises(PlanError, match=r"E248.*compile"):
        compile_plan(of_7b(512), placement, parse_cluster("h100:8", 1), name="p")
