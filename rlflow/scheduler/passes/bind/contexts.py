"""How ranks with parts of the same rows attend: what takes less, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlflow.errors import PlanError
from rlflow.graph.graph import Node
from rlflow.graph.placement import ContextBy, On
from rlflow.modelfiles.layouts.contexts import ways_to_attend
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import instance_seconds, row_parts, without_measurements
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.models.flops import recomputed_layers
from rlflow.scheduler.passes.bind.instances import two_layouts
from rlflow.scheduler.plan.plan import Instance
from rlflow.scheduler.plan.text import duration

HOW: dict[ContextBy, str] = {
    "ulysses": "each to all tokens with a part of the heads",
    "ring": "keys and values go round",
}


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
    if said is not None or costs.shapes[instance.model] is None:
        return replace(instance, cp_by=said or "ulysses")
    tables, passed = without_measurements(costs), [n for n in nodes if n.averages is None]
    tried = [replace(instance, cp_by=way) for way in _ways(instance, costs)]
    return min(tried, key=lambda way: instance_seconds(way, passed, tables), default=instance)


def _ways(instance: Instance, costs: Costs) -> tuple[ContextBy, ...]:
    """The ways in which the ranks of a model with a shape can attend."""
    shape = costs.shapes[instance.model]
    assert shape is not None
    return ways_to_attend(
        shape.heads, instance.cp, instance.tp, windows=shape.windows, carrying=shape.carrying
    )


def _said(instance: Instance, nodes: Sequence[Node], chosen: Mapping[str, On]) -> ContextBy | None:
    """The way that uses beside rollouts name, None where none does; they have to agree."""
    spoken = [
        (node, way)
        for node in nodes
        if node.op.use != "rollout"
        and (where := chosen.get(node.name)) is not None
        and (way := where.cp_by) is not None
    ]
    for node, way in spoken:
        if way != spoken[0][1]:
            texts = f"cp_by={way}", f"cp_by={spoken[0][1]}"
            raise PlanError(two_layouts(node, instance, *texts))
    return spoken[0][1] if spoken else None


def context_note(instance: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """How an instance's ranks attend, what they send use by use, and what the other way takes."""
    way = instance.cp_by or "ulysses"
    text = f"rows of {instance.name} lie on cp={instance.cp} ranks, a part of their tokens on each;"
    text += f" {HOW[way]} (cp_by={way!r})"
    passed = [node for node in nodes if node.averages is None]
    if costs.shapes[instance.model] is None:
        return text
    told = [_sent(node, instance, costs) for node in passed if node.op.use != "rollout"]
    return "; ".join([text, *told, *_other(instance, way, passed, costs)])


def _sent(node: Node, instance: Instance, costs: Costs) -> str:
    """What a rank sends to others in a forward, or a step with its backward, of a node's rows."""
    shape = costs.shapes[instance.model]
    assert shape is not None
    roof = costs.roofline(instance, shape)
    tokens, _, pairs = roof.ending(costs.load(node, row_parts(node, instance)))
    times, back, what = 1.0, 0, "a pass"
    if node.op.use == "train":
        again = recomputed_layers(instance.recomputes, shape.layers) / shape.layers
        times, back, what = 1 + again, 1, "a step"
    rows = roof.rows
    moved = (times * rows.sent + back * rows.sent_back) * tokens
    waited = duration(roof.exchanged(tokens, pairs, times, back))
    beside = " beside what is computed" if instance.cp_by == "ring" else ""
    return f"{what} of {node.name} sends {amount(int(moved))} a rank, {waited}{beside}"


def _other(instance: Instance, way: ContextBy, nodes: Sequence[Node], costs: Costs) -> list[str]:
    """What the other way would take, or why there is none."""
    shape = costs.shapes[instance.model]
    assert shape is not None
    others = [other for other in _ways(instance, costs) if other != way]
    if not others:
        sizes = f"{shape.heads} heads" + (f" over tp={instance.tp}" if instance.tp > 1 else "")
        none = "windows of rows have no ring"
        if shape.carrying.layers:
            none = "states have no ring"
        return [none if way == "ulysses" else f"{sizes} do not divide by {instance.cp} for ulysses"]
    tables = without_measurements(costs)
    took, other = (
        instance_seconds(replace(instance, cp_by=each), nodes, tables) for each in (way, others[0])
    )
    longer = "longer" if other >= took else "shorter"
    return [f"{others[0]} would take {duration(abs(other - took))} {longer} by estimate"]
