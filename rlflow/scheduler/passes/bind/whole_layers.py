"""Which trained instances would be faster where layers, or gradients, stay whole for longer.

Layers from forward to backward (`kept_whole`), gradients to the last micro-batch (`reduces_last`).

By model shape and device table alone: what is measured of one layout says nothing of the other, and
a choice that turned with every run's measurements would be none.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

from rlflow.graph.graph import Node
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.microbatches import instance_seconds, needed, without_measurements
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.passes.bind.bind import place_of
from rlflow.scheduler.plan.plan import Action, Instance, Plan
from rlflow.scheduler.plan.text import duration

# Of an update's seconds, what a choice has to gain: less no estimate tells apart, and gigabytes are
# held for it.
WORTH = 0.01
Way = Literal["kept_whole", "reduces_last"]
# What stays whole for longer, and what a placement says of it.
WAYS: dict[Way, str] = {"kept_whole": "reshard_after_forward", "reduces_last": "gradient_sync"}


def faster_whole(plan: Plan, context: Context) -> list[tuple[Way, str]]:
    """The instances of a plan whose updates take less so and fit alone, those that gain most first.

    None on CPU devices, where a gather is a copy within one memory, and none of which a placement
    says `reshard_after_forward`, or `gradient_sync`.
    """
    if context.cluster.is_cpu:
        return []
    costs = replace(context.costs, graph=plan.graph)
    gains: list[tuple[float, Way, str]] = []
    for instance, way in product(plan.instances, WAYS):
        nodes = _updates(instance, plan, context, way)
        if not nodes:
            continue
        whole = in_way(instance, way)
        now = instance_seconds(instance, nodes, costs)
        gain = now - instance_seconds(whole, nodes, costs)
        room = min(plan.budget(device) for device in instance.devices)
        if gain > WORTH * now and all(needed(node, whole, costs) <= room for node in nodes):
            gains.append((-gain, way, instance.name))
    return [(way, name) for _, way, name in sorted(gains)]


def in_way(instance: Instance, way: Way) -> Instance:
    """The instance with layers, or gradients, that stay whole for longer."""
    whole = way == "kept_whole"
    return replace(instance, kept_whole=True) if whole else replace(instance, reduces_last=True)


def choosing(context: Context, way: Way, name: str) -> Context:
    """The context by which an instance does so."""
    if way == "kept_whole":
        return replace(context, kept_whole=context.kept_whole | {name})
    return replace(context, reduces_last=context.reduces_last | {name})


def _updates(instance: Instance, plan: Plan, context: Context, way: Way) -> list[Node]:
    """The updates of an instance of which nothing is said; none where they gather nothing."""
    if not instance.trained or instance.shards == 1 or in_way(instance, way) == instance:
        return []
    uses = [node for node in plan.graph.nodes if node.model == instance.model and not node.averages]
    updates = [node for node in uses if node.op.use == "train"]
    for node in uses:
        where = place_of(node, plan.graph, context.placement)
        mine = where is not None and where.pool == instance.pool
        if mine and where is not None and getattr(where, WAYS[way]) is not None:
            return []
    return updates


def by_tables(context: Context) -> Context:
    """A context that knows of no measurements, and whose plans nothing improves."""
    return replace(context, costs=without_measurements(context.costs), optimize=0.0)


def estimated_period(plan: Plan) -> float:
    """Seconds of an iteration by estimate; 0 where sizes of models are not known."""
    return plan.timing.period if plan.timing is not None else 0.0


def _learns(plan: Plan, action: Action) -> bool:
    return action.kind == "run" and plan.graph.node(str(action.node)).op.use == "train"


def whole_text(name: str, before: Plan, after: Plan) -> str:
    """What is said of layers that stay whole: seconds and bytes beside the plan without."""
    shorter = estimated_period(before) - estimated_period(after)
    held = [
        max(a.cost.transient or 0 for a in plan.actions if _learns(plan, a) and a.instance == name)
        for plan in (before, after)
    ]
    text = f"layers of {name} stay whole from an update's forward to its backward "
    text += f"(reshard_after_forward=False): an iteration is {duration(shorter)} shorter by "
    return text + f"estimate, and its update holds {amount(held[1] - held[0])} more"
