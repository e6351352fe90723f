"""A plan as one device of it: of stages of a pipeline, what its own holds, not the fullest one.

A plan counts on every device what the fullest stage holds of each part; a rehearsal is of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.pieces import piece_done
from rlflow.scheduler.observed import work_parts
from rlflow.scheduler.passes.bind.instances import memory_parts
from rlflow.scheduler.plan.plan import Action, Instance, Part, Plan


def rehearsed_devices(plan: Plan) -> tuple[int, ...]:
    """The first device of each pool, and of the first, second and last stage of each model."""
    found = dict.fromkeys(devices[0] for devices in plan.pools.values())
    for instance in plan.instances:
        for stage in sorted({0, min(1, instance.pp - 1), instance.pp - 1}):
            found[instance.devices[stage * instance.stage_ranks]] = None
    return tuple(found)


def as_held_by(plan: Plan, costs: Costs, own: int) -> Plan:
    """The plan with the bytes of the stages that a device has."""
    cut = {i.name: _counts(i, costs, own) for i in plan.instances if i.pp > 1 and own in i.devices}
    if not cut:
        return plan
    sizes = {part.name: part.size for name in cut for part in _parts(plan, name, cut[name])}
    return replace(
        plan,
        parts=tuple(replace(p, size=sizes.get(p.name, p.size)) for p in plan.parts),
        actions=tuple(
            _action(plan, action, cut.get(str(action.instance))) for action in plan.actions
        ),
        saved=tuple(
            replace(s, size=cut[s.instance].saved(plan.instance(s.instance)) or 0)
            if s.instance in cut
            else s
            for s in plan.saved
        ),
    )


def _counts(instance: Instance, costs: Costs, own: int) -> Costs:
    """The costs of the stage that a device has of an instance."""
    return replace(costs, stage=instance.stage_of(own))


def _parts(plan: Plan, name: str, costs: Costs) -> Iterator[Part]:
    nodes = [plan.graph.node(str(a.node)) for a in plan.actions if a.instance == name and a.node]
    yield from memory_parts(plan.instance(name), nodes, costs)


def _action(plan: Plan, action: Action, costs: Costs | None) -> Action:
    """An action with what it holds of the device, where that is a run of what is cut."""
    if costs is None or action.kind != "run":
        return action
    node, instance = plan.graph.node(str(action.node)), plan.instance(str(action.instance))
    found = costs.table(node, instance, work_parts(plan, action), piece_done(action))
    cost = replace(action.cost, transient=found.transient, holds=found.holds)
    return replace(action, cost=cost)
