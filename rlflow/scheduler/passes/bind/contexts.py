"""How ranks with parts of the same rows attend: what takes less, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlflow.errors import PlanError
from rlflow.graph.graph import Node
from rlflow.graph.placement import ContextBy, On
from rlflow.modelfiles.layouts.contexts import ways_to_attend
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import instance_seconds, without_measurements
from rlflow.scheduler.passes.bind.instances import two_layouts
from rlflow.scheduler.plan.plan import Instance


def with_way_to_attend(
    instance: Instance, nodes: Sequence[Node], chosen: Mapping[str, On], costs: Costs
) -> Instance:
    """An instance whose ranks along `cp` attend as its uses say, or as takes less by shapes.

    Raises PlanError where two uses want two ways. One that nothing fits stays as it is said: it is
    refused with what else is wrong of its layout.
    """
    if instance.cp == 1:
        return instance
    said = _said(instance, nodes, chosen)
    shape = costs.shapes[instance.model]
    if said is not None or shape is None:
        return replace(instance, cp_by=said or "ulysses")
    ways = ways_to_attend(shape.heads, instance.cp, instance.tp, windows=shape.windows)
    tables, passed = without_measurements(costs), [n for n in nodes if n.averages is None]
    tried = [replace(instance, cp_by=way) for way in ways]
    return min(tried, key=lambda way: instance_seconds(way, passed, tables), default=instance)


def _said(instance: Instance, nodes: Sequence[Node], chosen: Mapping[str, On]) -> ContextBy | None:
    """The way that uses beside rollouts name, None where none does; they have to agree."""
    spoken = [
        (node, way)
        for node in nodes
        if node.op.use != "rollout" and (way := chosen[node.name].cp_by) is not None
    ]
    for node, way in spoken:
        if way != spoken[0][1]:
            texts = f"cp_by={way}", f"cp_by={spoken[0][1]}"
            raise PlanError(two_layouts(node, instance, *texts))
    return spoken[0][1] if spoken else None
