"""A loop after a loop: rows are drawn until enough groups count, then those go round again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.report.diagrams.fold import folded_graph
from rlflow.scheduler.verify.verify import verify
from tests.runtime.whole_runs import SEQUENTIAL, numbers

pytestmark = pytest.mark.torch


def test_the_second_loop_waits_for_the_first_and_both_are_drawn_folded(rlflow):
    plan = compile_target(Target(pipeline=SEQUENTIAL.file, devices="cpu:1")).compiled.plan
    first = plan.action("grown")
    assert {"draw"} == {dep.action for dep in first.after if dep.kind == "data"}
    assert {"draw", "count"} == {a.trip.loop for a in plan.actions if a.trip is not None}
    free = replace(first, after=tuple(d for d in first.after if d.action != "draw"))
    actions = tuple(free if a.id == first.id else a for a in plan.actions)
    assert [] == verify(plan, stage="notes")
    assert verify(replace(plan, actions=actions), stage="notes")

    small = folded_graph(json.loads(json.dumps(plan.graph.to_json())))
    assert {"draw", "count", "grown", "actor.rollout"} <= {n["name"] for n in small["nodes"]}
    assert not [node["name"] for node in small["nodes"] if "#" in node["name"]]
    drawn = rlflow("viz", SEQUENTIAL.file, "--level", "plan", "--format", "dot", "-o", "-")
    assert 0 == drawn.code, drawn.err
    assert "#2" not in drawn.out


@pytest.mark.slow
def test_each_loop_has_its_own_trips(train):
    for line in numbers(train(SEQUENTIAL, "one")):
        assert (3.0, 3.0) == (line["count/trips"], line["counted/count_min"])
        assert 1 <= line["draw/trips"] <= 4
