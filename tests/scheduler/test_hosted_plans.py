"""Activations that lie on the host from an update's forward to its backward: plans with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pydantic
import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.modelfiles.hosted import PIECE_BYTES
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.test_visiting_plans import of_7b, planned

HOSTED = {"offload": "activations"}
HIDDEN = 3584 * 2
TOKENS = 4 * 512 + 2 * len("9 + 9")  # Four rows of two prompts on each of four devices.
KEPT = (4 * 3584 + 2 * 32 * 128 + 3 * 18_944) * 2 + 8 * 3584


def holds(plan: Plan) -> dict[str, int]:
    return dict(plan.action("actor.update").cost.holds)


def on_host(plan: Plan) -> int:
    return plan.part("actor@all/activations").on_host


@pytest.mark.parametrize(
    ("recompute", "there", "sent"),
    [
        (False, 2 * KEPT, 27 * KEPT),
        (True, 2 * HIDDEN, 27 * HIDDEN),
        (20, 2 * KEPT + 2 * HIDDEN, 20 * HIDDEN + 7 * KEPT),
    ],
)
def test_two_layers_are_on_the_device_and_the_rest_on_the_host(
    recompute: bool | int, there: int, sent: int
) -> None:
    plan = planned(512, devices=4, recompute=recompute, **HOSTED)
    plain = planned(512, devices=4, recompute=recompute)
    assert holds(plan)["activations"] == pytest.approx(there * TOKENS, rel=1e-6)
    assert 0 <= on_host(plan) - sent * TOKENS < PIECE_BYTES
    assert plan.part("actor@all/activations").size == 0
    assert "offload=activations" in plan.trained_instance("actor").layout()
    assert plan.peaks[-1] - plain.peaks[-1] == 4 * on_host(plan)
    assert not plan.instance("ref@all").hosts_activations


def test_copies_run_beside_forward_and_backward() -> None:
    """Of all that layers keep they take longer than the layers; of inputs they do not."""
    plain, hosted = (
        planned(512, devices=4, **on).action("actor.update").cost.seconds for on in ({}, HOSTED)
    )
    again, inputs = (
        planned(512, devices=4, recompute=True, **on).action("actor.update").cost.seconds
        for on in ({}, HOSTED)
    )
    assert inputs == again
    assert plain < hosted
    kind = KINDS["h100"]
    roof = planned(512, devices=4, **HOSTED)
    least = on_host(roof) / (kind.host_link * kind.reached)
    assert hosted > 0.9 * least


def test_seven_billion_parameters_read_long_rows_on_two_devices() -> None:
    """Of responses of 8,192 tokens the activations alone are more than a device has."""
    actor = planned(8192).trained_instance("actor")
    assert actor.recomputes or actor.offload  # Unasked, for without either nothing fits.
    for on in (HOSTED, {**HOSTED, "recompute": True}, {"offload": ("activations", "optimizer")}):
        plan = planned(8192, **on)
        assert max(size for device, size in plan.peaks.items() if device >= 0) <= plan.budget(0)
        assert not verify(plan, "notes")


def test_several_offloads_are_a_list_in_any_order() -> None:
    both = rf.on("all", offload=["optimizer", "activations"])
    assert both == rf.on("all", offload=("activations", "optimizer", "optimizer"))
    assert both.offloads == ("optimizer", "activations")
    assert "offload=optimizer,activations" in both.describe()
    assert rf.on("all", offload=["optimizer"]) == rf.on("all", offload="optimizer")
    assert rf.on("all", offload=[]) == rf.on("all")
    with pytest.raises(pydantic.ValidationError):
        rf.on("all", offload=["optimizer", "weights"])
    plan = planned(512, offload=["activations", "optimizer"])
    actor = plan.trained_instance("actor")
    assert "offload=optimizer,activations" in actor.layout()
    assert (actor.offload, actor.hosts_activations) == ("optimizer", True)


def test_a_plan_with_it_is_read_back_and_one_without_says_nothing(tmp_path: Path) -> None:
    saved, plan = tmp_path / "plan.json", planned(512, **HOSTED)
    saved.write_text(dump_plan(plan))
    found = read_plan(saved)
    assert found.trained_instance("actor").hosts_activations
    assert found.part("actor@all/activations") == plan.part("actor@all/activations")
    assert "hosts_activations" not in planned(512).trained_instance("actor").as_json()


def test_other_sizes_are_refused() -> None:
    plan = planned(512, **HOSTED)
    name = "actor@all/activations"
    for change in ({"size": 8}, {"on_host": 8}):
        parts = tuple(replace(p, **change) if p.name == name else p for p in plan.parts)
        assert any(name in found for found in verify(replace(plan, parts=parts), "notes"))
    parts = tuple(part for part in plan.parts if part.name != name)
    assert any(name in found for found in verify(replace(plan, parts=parts), "notes"))


def test_an_engine_has_none() -> None:
    assign = {"*": rf.on("all"), "actor.rollout": rf.on("all", engine="sglang", **HOSTED)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    with pytest.raises(PlanError, match=r"E248.*offload=activations"):
        compile_plan(of_7b(512), placement, parse_cluster("h100:8", 1), name="p")
