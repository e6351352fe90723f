"""The order in which instances are loaded, so that every device has room for each of them.

A plan proves the memory of its actions, each with the parts that it needs; all instances
together may be more than a device has. So one at a time is loaded with all its parts, and what
the plan does not begin with leaves before the next. Knows the plan, no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rlflow.scheduler.plan.plan import HOST, Instance, Part, Plan

# What is there once an instance is loaded; gradients are made by its first update.
LOADED = ("weights", "optimizer", "pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """One step of a start: `load` of an instance, `sleep` or `wake` of a part, by its name."""

    kind: Literal["load", "sleep", "wake"]
    name: str


def start_steps(plan: Plan) -> tuple[StartStep, ...]:
    """What a start does, in order, the same on all ranks.

    Models of workers come first, then engines, each kind with those first that leave most: so
    what stays awake is loaded last. Where what is awake by then leaves too little room for an
    instance, parts of workers leave meanwhile, and are woken at the end.
    """
    parts = {i.name: [p for p in plan.parts if p.instance == i.name] for i in plan.instances}
    awake = frozenset(plan.awake_at_start)
    held: dict[str, Part] = {}
    away: dict[str, Part] = {}
    found: list[StartStep] = []
    for instance in load_order(plan, parts, awake):
        own = [part for part in parts[instance.name] if part.kind in LOADED]
        for part in _making_room(plan, held, away, own):
            away[part.name] = held[part.name]
            found.append(StartStep(kind="sleep", name=part.name))
        found.append(StartStep(kind="load", name=instance.name))
        held |= {part.name: part for part in own}
        for part in parts[instance.name]:
            if part.name not in awake and part.kind != "activations":  # On no device anyway.
                away[part.name] = part
                found.append(StartStep(kind="sleep", name=part.name))
    return (*found, *(StartStep(kind="wake", name=name) for name in away if name in awake))


def load_order(
    plan: Plan, parts: Mapping[str, Collection[Part]], awake: Collection[str]
) -> list[Instance]:
    """The instances as they are loaded; a drafter in an engine comes right after its engine."""

    def leaves(instance: Instance) -> int:
        return sum(p.size or 0 for p in parts[instance.name] if p.name not in awake)

    alone = [i for i in plan.instances if not i.engine_plan.lies_inside]
    alone.sort(key=lambda i: (i.engine_plan.own_process, -leaves(i)))
    return [
        each
        for instance in alone
        for each in (instance, *(i for i in plan.instances if i.inside == instance.name))
    ]


def _making_room(
    plan: Plan, held: Mapping[str, Part], away: Mapping[str, Part], own: Collection[Part]
) -> list[Part]:
    """The parts of workers that have to leave before an instance is loaded, the largest first."""
    rooms = {device: plan.budget(device) for part in own for device in part.devices}
    for name, part in held.items():
        for device in rooms.keys() & {*part.devices}:
            asleep = name in away and device not in part.stays
            rooms[device] -= part.residual if asleep else part.size or 0
    for part in own:
        for device in part.devices:
            rooms[device] -= part.size or 0
    candidates = [
        part
        for part in held.values()
        if part.name not in away and not plan.instance(part.instance).engine_plan.in_process
    ]
    found = []
    for part in sorted(candidates, key=lambda part: -(part.size or 0)):
        short = {device for device, room in rooms.items() if room < 0 and device != HOST}
        freed = short & {*part.leaves}
        if freed and part.size:
            found.append(part)
            for device in freed:
                rooms[device] += part.size - part.residual
    return found
