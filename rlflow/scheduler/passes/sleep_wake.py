"""Sleeps and wakes as actions of a plan: their ids, devices, reasons and dependencies.

A sleep runs after the last use of its part, and before the first action that needs the room. A
wake runs after the last such action, and before the next use of its part. This file decides
neither which parts move nor when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.drafting import brought_awake
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.engines.moving import moved_part, moving
from rlflow.scheduler.memory.demand import Traced
from rlflow.scheduler.memory.intervals import Trace
from rlflow.scheduler.memory.on_hosts import bytes_freed
from rlflow.scheduler.memory.prefetch import SleepInterval, Spot, waits
from rlflow.scheduler.plan.plan import Action, Cost, Dep, Instance, Mode, Part, Plan, Reason


def move_cost(
    plan: Plan, context: Context, part: Part, mode: Mode, kind: Literal["sleep", "wake"] = "wake"
) -> Cost:
    """The cost of a sleep or wake: nothing is copied of what is discarded, but for a drafter."""
    instance = plan.instance(part.instance)
    each = bytes_freed(part)
    if mode == "discard":
        each = _drafting(instance, part, context) if kind == "wake" else 0
    cost = context.costs.copy(each * len(part.leaves), devices=part.leaves, kind=kind)
    if not instance.engine_plan.own_process:
        return cost
    return moving(cost, instance, kind, moved_part(part, mode), context.costs)


def _drafting(instance: Instance, part: Part, context: Context) -> int:
    """Bytes of what drafts that a wake of an engine's weights brings to each device."""
    if part.kind != "weights" or not instance.engine_plan.own_process:
        return 0
    return brought_awake(instance, context.costs)


def with_moves(plan: Plan, traced: Traced, spots: Sequence[Spot], context: Context) -> Plan:
    """The plan with a sleep and a wake for every nap, in its list and its dependencies."""
    numbers: dict[tuple[str, bool], int] = {}
    ids: dict[tuple[int, bool], str] = {}
    for spot in spots:
        part = traced.parts[spot.nap.gap].name
        number = numbers[part, spot.wake] = numbers.get((part, spot.wake), 0) + 1
        name = f"{'wake' if spot.wake else 'sleep'}:{part}" + (f"#{number}" if number > 1 else "")
        ids[spot.nap.gap, spot.wake] = name
    extra: dict[str, list[Dep]] = {}
    made: dict[int, list[Action]] = {}
    for spot in spots:
        action = _action(plan, traced, spot, ids[spot.nap.gap, spot.wake], context)
        made.setdefault(spot.slot, []).append(action)
        for name, dep in _waits(plan, traced.trace, spot, action.id):
            extra.setdefault(name, []).append(dep)
    actions: list[Action] = []
    for slot in range(len(plan.actions) + 1):
        actions += [*made.get(slot, []), *plan.actions[slot : slot + 1]]
    after = {a.id: tuple(dict.fromkeys((*a.after, *extra.get(a.id, ())))) for a in actions}
    first = {str(a.part): a.kind for a in reversed(actions) if a.part is not None}
    used = {name for a in actions for name in a.needs}
    awake = tuple(p.name for p in plan.parts if p.name in used and first.get(p.name) != "wake")
    return replace(
        plan,
        actions=tuple(replace(a, after=after[a.id]) for a in actions),
        awake_at_start=awake,
    )


def _waits(plan: Plan, trace: Trace, spot: Spot, move: str) -> list[tuple[str, Dep]]:
    """Who waits for what because of a move: (action, dependency)."""

    def name(place: int | None) -> str:
        return move if place is None else plan.actions[place].id

    return [
        (name(target), Dep(action=name(source), distance=turns, kind="order"))
        for source, target, turns in waits(trace, spot)
    ]


def _action(plan: Plan, traced: Traced, spot: Spot, name: str, context: Context) -> Action:
    part, mode = traced.parts[spot.nap.gap], traced.modes[spot.nap.gap]
    text = _why_wake(plan, traced, spot.nap) if spot.wake else _why_sleep(plan, traced, spot.nap)
    kind: Literal["sleep", "wake"] = "wake" if spot.wake else "sleep"
    drafting = _drafting(plan.instance(part.instance), part, context)
    if spot.wake and mode == "discard" and drafting:
        text += f"; what drafts in it comes from its host, {amount(drafting)}"
    return Action(
        id=name,
        kind=kind,
        reason=Reason(rule="needed" if spot.wake else "memory", text=text),
        devices=part.leaves,
        pool=plan.instance(part.instance).pool,
        instance=part.instance,
        part=part.name,
        mode=mode,
        cost=move_cost(plan, context, part, mode, kind),
    )


def _why_wake(plan: Plan, traced: Traced, nap: SleepInterval) -> str:
    """Who needs the part, and what runs while it returns."""
    gap, part = traced.trace.gaps[nap.gap], traced.parts[nap.gap]
    text = f"needed by {plan.actions[gap.until].id}"
    if traced.modes[nap.gap] == "discard":
        makers = {
            "gradients": "each step makes it anew",
            "pool": "the rollout fills it",
            "weights": "the reshard fills it",
        }
        return f"{text}: allocated, {makers[part.kind]}"
    beside = _running(plan, nap.behind)
    return f"{text}; returns while {beside}" if beside else f"{text}; nothing runs beside it"


def _why_sleep(plan: Plan, traced: Traced, nap: SleepInterval) -> str:
    """For whom it makes room, why it is the one that leaves, and what runs while it does."""
    part = traced.parts[nap.gap]
    fullest = _fullest(traced.trace, nap)
    text = f"makes room for {plan.actions[fullest].id}; "
    if part.kind == "gradients":
        return text + "of no use after an update"
    if part.kind == "pool":
        return text + "of no use between two rollouts"
    if traced.modes[nap.gap] == "discard":
        return text + "overwritten before it is read"
    text += "farthest next use" if _farthest(traced.trace, nap, fullest) else "fewest bytes to move"
    beside = _running(plan, nap.before)
    return f"{text}; leaves while {beside}" if beside else text


def _fullest(trace: Trace, nap: SleepInterval) -> int:
    """The place in a nap with the least room for what it does not need."""
    rooms: dict[int, int] = {}
    for ring, index in trace.gaps[nap.gap].rows:
        place, room = trace.rings[ring].places[index], trace.room((ring, index))
        rooms[place] = min(room, rooms.get(place, room))
    return min(nap.places, key=lambda place: rooms[place])


def _farthest(trace: Trace, nap: SleepInterval, place: int) -> bool:
    """Whether no other part that could leave at a place is used later than this one."""
    length = trace.length
    own = set(trace.gaps[nap.gap].rings)
    ahead = {
        (gap.until - place) % length
        for gap in trace.gaps
        if own.intersection(gap.rings) and gap.covers(place, length)
    }
    return max(ahead) == (trace.gaps[nap.gap].until - place) % length


def _running(plan: Plan, places: Sequence[int]) -> str:
    """`a runs`, `a and b run`, `a to c run`; empty without places."""
    names = [plan.actions[place].id for place in places]
    if len(names) > 2:
        return f"{names[0]} to {names[-1]} run"
    return " and ".join(names) + (" runs" if len(names) == 1 else " run") if names else ""
