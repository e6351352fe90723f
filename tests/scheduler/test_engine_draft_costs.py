"""What drafts in an engine cost: in its pool, in what it computes in, on its host, and in keys."""

from __future__ import annotations

from dataclasses import replace

import rlflow as rf
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs import Costs
from rlflow.scheduler.measured import NOTHING, Sample
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.serving import pool_key
from rlflow.scheduler.shapes import model_shape
from tests.scheduler.examples import compiled_with
from tests.scheduler.strategies import PLENTY, cluster
from tests.scheduler.test_engine_drafters import ENGINE, MID, TINY, drafted, placed


def costs_on(plan: Plan, kind: str = "h100") -> Costs:
    """The costs that a plan is made by, on devices with plenty of memory."""
    shapes = {model.name: model_shape(model) for model in plan.graph.models}
    devices = cluster(kind, len(plan.budgets), PLENTY)
    return Costs(graph=plan.graph, cluster=devices, shapes=shapes, backend=plan.backend)


def pool_of(plan: Plan) -> int:
    part = plan.part(f"{ENGINE}/pool")
    return dict(part.holds)["keys and values"]


def test_tokens_of_a_measured_pool_are_of_policy_and_drafter_on_each_rank() -> None:
    """A token has 2 x 2 x (128 + 32) numbers over two ranks; a run told of 5000 such tokens."""
    graph = drafted(temperature=1.0)
    placement = placed(2, tp=2, engine=rf.SGLang(mem_fraction_static=0.5))
    plan = compiled_with(graph, placement, kind="h100").plan
    costs = costs_on(plan)
    sample = Sample("run", 4, 0.0, 0.0, held=5000.0)
    key = pool_key(costs, plan.instance(ENGINE))
    known = replace(costs.cluster, measured=NOTHING.adding([(key, costs.setting, sample)]))
    again = compile_plan(graph, placement, known).plan
    assert 5000 * 4 * 2 * 2 * (128 + 32) // 2 == pool_of(again)
    assert int(PLENTY / 2) - (MID + TINY) // 2 == pool_of(plan)
