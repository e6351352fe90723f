"""What a plan chooses of itself so that an update fits: micro-batches, recomputing, offloading."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler.costs.microbatches import in_micro_batches, instance_seconds, needed
from rlflow.scheduler.devices.cluster import KINDS
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.examples import compiled_with, grpo
from tests.scheduler.test_costs_estimates import costs_for, on
from tests.scheduler.test_visiting_plans import of_7b, planned

LAYERS = 28
ROOM = int(KINDS["h100"].memory * 0.92)
SIZES = [32_768 >> halved for halved in range(6)]


@pytest.mark.parametrize(
    ("longest", "room"), [(8192, ROOM), (8192, 62 * 10**9), (20_000, ROOM), (6000, 60 * 10**9)]
)
def test_of_all_ways_that_fit_the_shortest_is_taken(longest: int, room: int) -> None:
    """Any number of layers, all of them, or all but attention; any size; resident or not."""
    costs = costs_for(of_7b(longest), "h100:2")
    instance = on((0, 1), trained=True, fsdp=2)
    nodes = [costs.graph.node("actor.update")]
    counts = [(False, n) for n in range(1, LAYERS)]
    ways = [
        replace(instance, recompute=again, recompute_first=first, offload=offload, micro_tokens=m)
        for again, first in [(False, None), ("selective", None), (True, None), *counts]
        for offload in (None, "optimizer")
        for m in SIZES
    ]
    fits = [way for way in ways if all(needed(node, way, costs) <= room for node in nodes)]
    assert not any((way.offload, way.recomputes) == (None, False) for way in fits)

    found = in_micro_batches(instance, nodes, room, costs, free=True)
    assert found in fits
    shortest = min(instance_seconds(way, nodes, costs) for way in fits)
    assert instance_seconds(found, nodes, costs) == pytest.approx(shortest, rel=1e-9)


def test_seven_billion_parameters_answer_in_8192_tokens_on_two_devices() -> None:
    plan = planned(8192)
    actor = plan.trained_instance("actor")
    assert actor.recompute_first
    (note,) = (note.text for note in plan.notes if note.rule == "recompute")
    assert note.startswith("a backward of actor@all computes the first ")
    assert f"(recompute={actor.recompute_first}): the update does not fit otherwise" in note
    assert note in explain(plan, plan.action("actor.update"))
    assert note not in explain(plan, plan.action("ref.log_probs"))
    said = planned(8192, recompute=actor.recompute_first)
    assert said.trained_instance("actor") == actor
    assert not any(note.rule == "recompute" for note in said.notes)


def test_what_is_said_of_recomputing_stays() -> None:
    assert planned(512).hash == planned(512, recompute=False).hash
    assert planned(512).trained_instance("actor").recomputes is False
    with pytest.raises(PlanError, match="E401"):
        planned(8192, recompute=False)


def test_a_cpu_recomputes_where_it_has_to() -> None:
    """A plan that fits stays as it is. With a byte less it computes a layer of four again."""

    def within(memory: float, **said: object) -> Plan:
        placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all", **said)})
        graph = grpo(path="models/wide", every=0, kl_coef=0.0)
        return compiled_with(graph, placement, memory=int(memory)).plan

    peaks = [max(within(1e12, recompute=again).peaks.values()) for again in (False, 1, 3)]
    found = [within(peak - less) for peak in peaks for less in (0, 1) if peak - less >= peaks[-1]]
    layouts = [plan.trained_instance("actor").layout() for plan in found]
    assert layouts == [
        "whole",
        *["whole recompute=1"] * 2,
        "whole recompute=2",
        "whole recompute=3",
    ]
    with pytest.raises(PlanError, match="E401"):
        within(peaks[-1] - 1)
