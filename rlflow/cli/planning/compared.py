"""Plans with their periods as ranges, and two placements of one pipeline beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlflow.cli.commands import Planned, Target, costs_of, declare, plan_declared
from rlflow.errors import Finding, UsageError
from rlflow.scheduler.plan.diff import PlanDiff, compare
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.simulate.ranges import period_range


def with_range(planned: Planned, *, asked: bool = False) -> Plan:
    """The plan with its period as a range: always on accelerators, on CPU devices where asked.

    What a CPU's plan prints stays as it is: a run makes it as exact as the machine is.
    """
    plan = planned.compiled.plan
    if planned.cluster.is_cpu and not asked:
        return plan
    return replace(plan, range=period_range(plan, costs_of(planned)))


def diff_placements(
    pipeline: str, placements: tuple[str, ...], *, ranged: bool = False, **options: Any
) -> PlanDiff:
    """Compile two placements of one pipeline and compare their plans, as ranges where asked."""
    target = Target(
        pipeline=pipeline,
        settings=options["settings"],
        model_shape=options.get("model_shape"),
        lengths=options.get("lengths"),
        acceptance=options.get("acceptance"),
    )
    declared = declare(target)
    names = placements or tuple(declared.pipeline.placements)[:2]
    if len(names) != 2:
        raise UsageError(
            Finding(
                code="E207",
                what=f"diff compares two placements, got {len(names)}",
                expected=", ".join(declared.pipeline.placements),
                fix=f"rlflow diff {pipeline} --placement A --placement B",
            )
        )
    plans = []
    for name in names:
        target = Target(pipeline=pipeline, placement=name, **options)
        plans.append(with_range(plan_declared(declared, target), asked=ranged))
    return compare(plans[0], plans[1])
