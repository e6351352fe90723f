"""Micro-batches that a placement says, and what a host adds to short passes of its devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.placement import On
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.serving import Serving
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.hardware import KINDS, Kind
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.test_visiting_plans import of_7b


def roofline(shape: str, kind: Kind) -> Roofline:
    return Roofline(kind=kind, shape=known_shape(shape), size=2)


def planned(**assign: On) -> Plan:
    placement = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all"), **assign})
    return compile_plan(of_7b(512), placement, parse_cluster("h100:8", 1), name="p").plan


def test_micro_batches_have_no_more_tokens_than_a_placement_says() -> None:
    said = planned(**{"actor.train": rf.on("all", micro=3000)}).trained_instance("actor")
    assert said.micro_tokens == 3000
    assert said.layout().endswith("micro=3000")
    assert planned().trained_instance("actor").micro_tokens > 3000


def test_an_engine_has_no_micro_batches() -> None:
    where = rf.on("all", tp=1, engine="sglang", micro=4096)
    with pytest.raises(PlanError, match=r"E248.*micro=4096"):
        planned(**{"actor.rollout": where})


def test_a_pass_takes_no_less_than_its_launches() -> None:
    """Of 54 operators a layer forward and 103 backward, and 31 and 21 beside the layers."""
    roof = roofline("qwen2.5-7b", KINDS["h100"])
    layers, launch = roof.shape.layers, KINDS["h100"].launch
    assert roof.launched_by_torch(0.0) == pytest.approx((54 * layers + 31) * launch)
    assert roof.launched_by_torch(0.0, 3) == pytest.approx((157 * layers + 52) * launch)
    assert roof.launched_by_torch(7.0, 3) == 7.0
    experts = roofline("qwen3-30b-a3b", KINDS["h100"])
    layers = experts.shape.layers
    assert experts.launched_by_torch(0.0) == pytest.approx((79 * layers + 31) * launch)


def test_a_slower_host_takes_longer_to_launch_and_to_schedule() -> None:
    """Grace takes 2.75 times as long as x86: a step of 256 rows has 6 ms more on the host."""
    grace = KINDS["gb200"]
    assert 2.7 < grace.host < 2.8
    assert grace.launch == pytest.approx(KINDS["h100"].launch * grace.host)
    assert {kind.host for kind in KINDS.values()} == {1.0, grace.host}
    serving = Serving(captured=512)
    fast, slow = (
        Roofline(kind=kind, shape=known_shape("qwen2.5-7b"), size=2, serving=serving)
        for kind in (replace(grace, host=1.0), grace)
    )
    more = (grace.host - 1) * serving.scheduled(256)
    assert 0.005 < more < 0.008
    assert slow.decoding()(256, 700) - fast.decoding()(256, 700) == pytest.approx(more)
