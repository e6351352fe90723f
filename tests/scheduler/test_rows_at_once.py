"""Slots of the embedded engine's pool: as many as memory has room for, said and priced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.modelfiles.paging import MOST_ROWS, pool_blocks, rows_at_once
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import needed, with_rows
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.strategies import graph_of

N = 8


@rf.op(per="row")
def kept(response: list[str]) -> None:
    """A sink, so that the plan is of a rollout alone."""


def of_rows(batch: int, new: int = 1024) -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "shape:deepseek-r1-distill-qwen-7b", dtype="bfloat16")
        data = rf.data.arithmetic(digits=2)
        samples = ops.rollout(actor, ops.prompts(data, batch=batch), n=N, max_new_tokens=new)
        kept(samples)

    return graph_of(declare)


def planned(batch: int, new: int = 1024, kind: str = "rtx4090") -> Plan:
    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    cluster = parse_cluster(f"{kind}:1", 1)
    return compile_plan(of_rows(batch, new), placement, cluster, name="p").plan


def costs_of(graph: Graph) -> Costs:
    shapes = {model.name: model_shape(model, None) for model in graph.models}
    return Costs(graph=graph, cluster=parse_cluster("h100:1", 1), shapes=shapes)


def test_a_model_that_fits_with_fewer_rows_at_once_is_planned_so(tmp_path: Path) -> None:
    """15.2 GB of weights on a GPU of 24: 7 GB are left for keys, values and logits."""
    plan = planned(batch=256)
    (actor,) = plan.instances
    assert 0 < actor.rows_at_once < MOST_ROWS
    assert 0 == actor.rows_at_once % N
    assert f"rows={actor.rows_at_once}" in actor.layout()
    (note,) = (note.text for note in plan.notes if note.rule == "rows at once")
    assert f"actor@all generate at most {actor.rows_at_once} rows at once, " in note
    assert note in explain(plan, plan.action("actor.rollout"))
    assert plan.peaks[0] <= plan.budget(0)

    saved = tmp_path / "plan.json"
    saved.write_text(dump_plan(plan))
    assert (actor.rows_at_once,) == tuple(i.rows_at_once for i in read_plan(saved).instances)


def test_ranks_that_share_each_layer_have_slots_for_as_many_rows_as_fit() -> None:
    """Keys and values of a token are half as many on each of two ranks, and so are the weights."""
    placement = rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", tp=2)})
    cluster = parse_cluster("rtx4090:2", 2)
    plan = compile_plan(of_rows(1024, 4096), placement, cluster, name="p").plan
    (actor,), (alone,) = plan.instances, planned(batch=1024, new=4096).instances
    assert alone.rows_at_once < actor.rows_at_once < MOST_ROWS
    assert all(plan.peaks[rank] <= plan.budget(rank) for rank in (0, 1))


def test_where_all_rows_fit_nothing_is_said_of_them() -> None:
    plan = planned(batch=256, kind="h100")
    (actor,) = plan.instances
    assert MOST_ROWS == actor.rows_at_once
    assert "rows_at_once" not in actor.as_json()
    assert "rows" not in actor.layout()


def test_where_no_prompts_rows_fit_the_refusal_is_the_one_there_was() -> None:
    with pytest.raises(PlanError, match="E401"):
        planned(batch=8, new=100_000)


@pytest.mark.parametrize("gigabytes", [16.5, 17.0, 18.5, 20.0, 24.0, 40.0])
def test_rows_are_the_most_that_fit(gigabytes: float) -> None:
    """Against all that there are: one prompt's rows more do not fit, and cost no more seconds."""
    graph, room = of_rows(256), int(gigabytes * 1e9)
    plan = planned(batch=256, kind="h100")
    node, instance = graph.node("actor.rollout"), plan.instances[0]
    costs = costs_of(graph)
    found = with_rows(instance, [node], room, costs).rows_at_once
    fits = [
        rows
        for rows in range(N, MOST_ROWS + 1, N)
        if needed(node, replace(instance, rows_at_once=rows), costs) <= room
    ]
    assert found == max(fits, default=MOST_ROWS)
    seconds = [
        costs.table(node, replace(instance, rows_at_once=rows), 1).seconds
        for rows in (64, 256, 512)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("most", [1, 7, 64, 512])
def test_a_pool_for_fewer_rows_is_no_larger(most: int) -> None:
    prompts = [300, 5, 128, 77] * 8
    assert pool_blocks(prompts, 4, 500, most) <= pool_blocks(prompts, 4, 500)
    assert max(most // 4, 1) * 4 == rows_at_once(1000, 4, most)
