"""Pass `residency`: which parts stay in a device's memory, which sleep, and when they return.

Where bytes have to move, `together` first looks for an order that is shorter with its copies. In a
known order the next use of every part is known: `eviction` chooses what stays so that few
bytes move, `prefetch` when the rest leaves and returns, beside the compute. This file turns their
choices into sleeps and wakes.

Gradients and the pools of engines are always discarded, and so are weights that a reshard
overwrites before they are read. Everything else is offloaded to the host. Nothing sleeps that
fits: of a part on several devices only the pieces on devices that are short of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlflow.errors import Finding, PlanError
from rlflow.scheduler.context import Context
from rlflow.scheduler.devices.cluster import amount, distinct_amounts
from rlflow.scheduler.engines.engines import with_savers
from rlflow.scheduler.memory.demand import Demand, demand_of
from rlflow.scheduler.memory.eviction import EFFORT, Residents, choose_residents, lru
from rlflow.scheduler.memory.intervals import Trace
from rlflow.scheduler.memory.judge import chosen_residents
from rlflow.scheduler.memory.prefetch import Spot, placed, said, shortened
from rlflow.scheduler.memory.profile import Instants, Memories
from rlflow.scheduler.passes.order import seconds_of
from rlflow.scheduler.passes.order_and_residency import Decided, Gap, joint_orders
from rlflow.scheduler.passes.sleep_wake import move_cost, with_moves
from rlflow.scheduler.passes.too_large import too_large
from rlflow.scheduler.plan.plan import HOST, Action, Part, Plan

LARGEST = 6


def residency(plan: Plan, context: Context) -> Plan:
    """Insert sleep and wake actions, and state the peak of every action, device and host.

    Raises PlanError where an action's own needs exceed a device (E401), or what sleeps and the
    rows that nodes keep a host's memory (E405).
    """
    unknown = sorted({part.instance for part in plan.parts if part.size is None})
    if unknown:
        plan = plan.noting(
            "unknown size",
            f"{', '.join(unknown)}: the files are not on this "
            "machine, so memory is not proven to fit",
        )
    memories = Memories(plan=plan)
    findings = too_large(plan, memories)
    if findings:
        raise PlanError(*findings)
    demand = demand_of(plan, memories)
    decided = joint_orders(plan, context, demand) if demand.held else (Decided(plan=plan),)
    return _stated(*_fitting(decided, context))


def _fitting(decisions: Sequence[Decided], context: Context) -> tuple[Plan, Instants]:
    """The first plan whose sleeps fit in the memory of a host, or the one that asks it for least.

    Sleeps are hidden behind copies of more parts where that is shorter; more are on the host.
    """
    tried: list[tuple[int, Plan, Instants]] = []
    for decided in decisions:
        plan, instants = _settled(decided, context)
        size, _, _ = instants.host_peak
        if HOST not in plan.budgets or size <= plan.budget(HOST):
            return _noting_host(plan, tried), instants
        tried.append((size, plan, instants))
    _, plan, instants = min(tried, key=lambda each: each[0])
    return plan, instants


def _settled(decided: Decided, context: Context) -> tuple[Plan, Instants]:
    """The plan with the sleeps that make room, on the devices where they do, and no others.

    What is left out stays from then on, and the other moves are placed anew beside it.
    """
    kept: frozenset[Gap] = frozenset()
    while True:
        plan, instants = _paged(decided, context, kept)
        part = _stays_somewhere(plan, instants)
        if part is not None:
            parts = (part if p.name == part.name else p for p in decided.plan.parts)
            decided = replace(decided, plan=replace(decided.plan, parts=tuple(parts)))
            kept = frozenset()
        elif needless := _needless(plan, instants):
            kept |= needless
        else:
            return plan, instants


def _paged(
    decided: Decided, context: Context, kept: frozenset[Gap] = frozenset()
) -> tuple[Plan, Instants]:
    """The plan with sleeps and wakes; what `stays` somewhere sleeps elsewhere, or nowhere.

    Through gaps that are `kept` parts stay: it was seen that they fit.
    """
    plan = decided.plan
    memories = Memories(plan=plan)
    demand = demand_of(plan, memories)
    traced = demand.traced()
    since = [plan.actions[gap.since].id for gap in traced.trace.gaps]
    gaps = list(zip((part.name for part in traced.parts), since, strict=True))
    if decided.moves:
        spots, choice = _as_decided(decided, traced.trace, gaps, kept)
    else:
        away = {number for number, gap in enumerate(gaps) if gap in decided.away}
        choice = chosen_residents(traced.trace, away, EFFORT)
        copies = [
            move_cost(plan, context, part, mode).seconds or 0.0
            for part, mode in zip(traced.parts, traced.modes, strict=True)
        ]
        seconds = [seconds_of(action) for action in plan.actions]
        stay = frozenset(number for number, gap in enumerate(gaps) if gap in kept)
        naps = shortened(traced.trace, choice.stay, copies, seconds, stay)
        spots = placed(traced.trace, naps)
    slept = {traced.parts[spot.nap.gap].name: traced.parts[spot.nap.gap] for spot in spots}
    parts = (slept.get(part.name, replace(part, stays=())) for part in plan.parts)
    plan = replace(plan, parts=tuple(parts))
    plan = with_moves(_noting(plan, demand, traced.trace, choice, decided), traced, spots, context)
    plan = with_savers(plan, context.costs)
    if any(part.stays for part in slept.values()):
        memories = Memories(plan=plan)
    return plan, Instants(plan, memories)


def _as_decided(
    decided: Decided, trace: Trace, gaps: Sequence[Gap], kept: frozenset[Gap]
) -> tuple[list[Spot], Residents]:
    """The moves that a solver has decided, and what stays beside them."""
    place = {action.id: number for number, action in enumerate(decided.plan.actions)}
    number = {gap: at for at, gap in enumerate(gaps) if gap not in kept}
    asleep = {
        number[gap]: frozenset(place[name] for name in names)
        for gap, names in decided.asleep.items()
        if gap in number
    }
    moves = [(number[gap], wake, at) for gap, wake, at in decided.moves if gap in number]
    stay = frozenset(range(len(gaps))).difference(asleep)
    return said(trace, asleep, moves), Residents(stay=stay, proven=decided.fewest)


def _stays_somewhere(plan: Plan, instants: Instants) -> Part | None:
    """The first part that sleeps on some of its devices for nothing, made to stay there."""
    for name, naps in instants.naps.items():
        part = plan.part(name)
        kinds: dict[tuple[int, ...], list[int]] = {}
        for devices in plan.instance(part.instance).processes:
            if not set(devices).intersection(part.stays):
                groups = tuple(dict.fromkeys(instants.memories.group[d] for d in devices))
                kinds.setdefault(groups, []).extend(devices)
        for groups, alike in kinds.items() if len(kinds) > 1 else ():
            if not instants.make_room(part, naps, groups):
                stays = {*part.stays, *alike}
                return replace(part, stays=tuple(d for d in part.devices if d in stays))
    return None


def _needless(plan: Plan, instants: Instants) -> frozenset[Gap]:
    """Gaps in which a part sleeps though it would fit; of those that overlap the first.

    A copy may be over earlier than its own place says, since copies take turns: then there is
    more room than it was counted to leave.
    """
    found: set[Gap] = set()
    taken = 0
    for name, naps in instants.naps.items():
        part = plan.part(name)
        for nap in naps:
            where = instants.memories.on[part.leaves]
            if not (taken & nap.inside or instants.make_room(part, [nap], where)):
                taken |= nap.inside
                found.add((name, _last_use(plan, nap.sleep)))
    return frozenset(found)


def _last_use(plan: Plan, sleep: Action) -> str:
    """The action that needs a part last before it sleeps, in this turn or the one before."""
    at = plan.actions.index(sleep)
    earlier = (*plan.actions[at:], *plan.actions[:at])
    return next(action.id for action in reversed(earlier) if sleep.part in action.needs)


def _noting_host(plan: Plan, tried: Sequence[tuple[int, Plan, Instants]]) -> Plan:
    """Why a plan is not the shortest that was found, if it is not."""
    if not tried:
        return plan
    size, has = distinct_amounts(tried[0][0], plan.budget(HOST))
    text = f"a shorter order with its copies takes {size} of a host's memory, which has {has}"
    return plan.noting("host memory", text)


def _noting(plan: Plan, demand: Demand, trace: Trace, choice: Residents, decided: Decided) -> Plan:
    """How many bytes sleeps and wakes move, and of what they are the fewest."""
    moved = trace.moved(choice.stay)
    if not moved:
        return plan
    text = f"sleeps and wakes move {amount(moved)} an iteration"
    least = choose_residents(trace)
    if moved == demand.fewest():
        text += ", the fewest that memory allows in any order"
    elif decided.fewest:
        text += ", the fewest of any order that takes no longer"
    elif choice.proven and not decided.away:
        text += ", the fewest for this order"
    elif (fewer := trace.moved(least.stay)) < moved:
        text += f"; {amount(fewer)} would do for this order, and take longer"
    elif not choice.proven:
        text += f"; by least recent use it would be {amount(trace.moved(lru(trace)))}"
    return plan.noting("residency", text)


def _stated(plan: Plan, instants: Instants) -> Plan:
    """The plan with the peak of every action, device and host; E405 for a host that is too small.

    A host without a known size is not held to one.
    """
    size, move, holders = instants.host_peak
    if HOST in plan.budgets and size > plan.budget(HOST):
        raise PlanError(_too_much_on_host(plan, size, move, holders))
    devices = {device for pool in plan.pools.values() for device in pool}
    known = sorted(devices.union(plan.budgets))
    most = instants.device_peaks()
    actions = tuple(replace(a, peak=instants.peaks[a.id]) for a in plan.actions)
    peaks = {d: size if d == HOST else most.get(d, 0) for d in known}
    return replace(plan, actions=actions, peaks=peaks)


def _too_much_on_host(
    plan: Plan, size: int, move: str, holders: tuple[tuple[int, str], ...]
) -> Finding:
    rows = [f"{amount(part)} {name}" for part, name in holders[:LARGEST]]
    rest = sum(part for part, _ in holders[LARGEST:])
    rows += [f"{amount(rest)} of {len(holders) - LARGEST} others"] if rest else []
    instant = f"during {move!r}" if move else "all the time"
    kept = [kept.node for kept in plan.kept]
    fewer = f"; a smaller keep= of {' and '.join(kept)}" if kept else ""
    return Finding(
        code="E405",
        what=f"what sleeps or is kept does not fit in the memory of a host, {instant}",
        got=f"{amount(size)} at once:\n" + "\n".join(rows),
        expected=f"at most {amount(plan.budget(HOST))}, the memory of a host beside its devices",
        fix="pools of their own for some models, or more devices for each" + fewer,
    )
