"""Acceptance of drafted tokens: what a run measures of it, and what later plans take."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.cli.commands import with_shapes
from rlflow.scheduler import observed
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.ranks.draft_turns import acceptance_of
from rlflow.scheduler.devices.measured import NOTHING, MeasuredCosts
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.strategies import cluster
from tests.scheduler.test_engine_drafters import drafted, placed
from tests.scheduler.test_measured_runs import played

SIZES = "actor=qwen2.5-7b,drafter=qwen2.5-7b"
CLUSTER = cluster("h100", 2, 1e12)


def planned(engine: object, measured: MeasuredCosts = NOTHING, said: float | None = None) -> Plan:
    graph = replace(with_shapes(drafted(temperature=1.0), SIZES), acceptance=said)
    known = replace(CLUSTER, measured=measured)
    return compile_plan(graph, placed(engine=engine), known, name="p").plan


def learned(plan: Plan, shares: list[float]) -> MeasuredCosts:
    """What a run with such shares of accepted tokens leaves of them in the file."""
    shapes = {model.name: known_shape(model.path.partition(":")[2]) for model in plan.graph.models}
    costs = Costs(graph=plan.graph, cluster=CLUSTER, shapes=shapes, backend=plan.backend)
    figures = [(n, {"actor.rollout/acceptance": share}) for n, share in enumerate(shares)]
    spans = played(plan, len(shares))
    found = observed.samples(plan, costs, spans, figures, begun=0, origin="run")
    return NOTHING.adding(entry for entry in found if entry[0].startswith("acceptance"))


def inputs(plan: Plan) -> str:
    return ", ".join(plan.inputs)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.877, 1.0])
def test_an_acceptance_is_found_from_the_share_of_all_drafted_tokens(chance: float) -> None:
    share = (chance + chance**2 + chance**3) / 3
    assert acceptance_of(share, 3) == pytest.approx(chance, abs=1e-6)
    assert acceptance_of(chance, 1) == pytest.approx(chance, abs=1e-6)


@pytest.mark.parametrize("engine", [rf.SGLang(), "torch"], ids=["engine", "embedded"])
def test_what_a_run_measured_is_counted_where_nothing_is_said(engine: object) -> None:
    """Without the first iteration; and what is said goes before it."""
    before = planned(engine)
    known = learned(before, [0.1, 0.77, 0.77, 0.77])
    (record,) = known.records
    assert record.accepted == pytest.approx(0.88, abs=0.01)
    after = planned(engine, known)
    assert "that verifies 3 (assumed)" in inputs(before)
    assert "that verifies 3 (measured, 1 run)" in inputs(after)
    one, other = (p.action("actor.rollout").cost.seconds or 0.0 for p in (before, after))
    assert other < one
    assert "acceptance 0.5, 1.88 tokens a pass that verifies 3 (given)" in inputs(
        planned(engine, known, said=0.5)
    )


def test_a_run_that_told_no_acceptance_leaves_none() -> None:
    assert () == learned(planned("torch"), []).records
