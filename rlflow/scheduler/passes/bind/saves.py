"""What saves copy of each device to its host, and loading takes there; notes on saves."""

from __future__ import annotations

from dataclasses import replace

from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.plan import LoadedState, Plan, SavedState


def with_saves(plan: Plan, costs: Costs) -> Plan:
    """The plan with what a save copies of every trained instance, and a note for each.

    Of accelerators: a CPU device's memory is its host's.
    """
    for instance in plan.instances:
        size = costs.saved(instance) if instance.trained else None
        if size is None or costs.cluster.is_cpu:
            continue
        devices = instance.devices
        seconds = costs.copy(size * len(devices), devices=devices).seconds or 0.0
        text = f"a save copies {amount(size)} of {instance.name} from each device to its host, "
        text += f"which takes {seconds:.2g} s at most; it is written beside what follows"
        state = SavedState(instance=instance.name, size=size)
        plan = replace(plan, saved=(*plan.saved, state)).noting("checkpoint", text)
    return plan


def with_loads(plan: Plan, costs: Costs) -> Plan:
    """The plan with what loading takes of the hosts of accelerators, whose copies are pinned."""
    if costs.cluster.is_cpu:
        return plan
    sizes = ((instance.name, costs.loading(instance)) for instance in plan.instances)
    loads = tuple(LoadedState(instance=name, size=size) for name, size in sizes if size)
    return replace(plan, loads=loads, pinned=True)
