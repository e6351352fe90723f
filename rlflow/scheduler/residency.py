"""Pass `residency`: what stays in a device's memory, what sleeps and when it returns.

With the order known, next uses are known. `paging` chooses what stays so that few bytes move,
`prefetch` when the rest leaves and returns, beside the compute; this file makes actions of
that. Gradients and the pools of engines are always discarded, and so are weights that a reshard
overwrites before they are read; everything else is offloaded to the host. Nothing is put to
sleep that fits: of a part on several devices only what is where memory is short.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rlflow.errors import Finding, PlanError
from rlflow.scheduler.cluster import amount
from rlflow.scheduler.context import Context
from rlflow.scheduler.engines import with_savers
from rlflow.scheduler.gaps import Gap, Ring, Trace
from rlflow.scheduler.instants import Instants, Memories, leaving
from rlflow.scheduler.moves import Traced, move_cost, with_moves
from rlflow.scheduler.order import device_name, seconds_of
from rlflow.scheduler.paging import Choice, choose, lru
from rlflow.scheduler.plan import HOST, Action, Mode, Part, Plan
from rlflow.scheduler.prefetch import shortened

LARGEST = 6


def residency(plan: Plan, context: Context) -> Plan:
    """Insert sleep and wake actions, and state the peak of every action, device and host.

    Raises PlanError where an action's own needs exceed a device (E401), or what sleeps a
    host's memory (E405).
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
    paged, instants = _paged(plan, context)
    while (part := _needless(paged, instants)) is not None:
        plan = replace(plan, parts=tuple(part if p.name == part.name else p for p in plan.parts))
        paged, instants = _paged(plan, context)
    return _stated(paged, instants)


def _paged(plan: Plan, context: Context) -> tuple[Plan, Instants]:
    """The plan with sleeps and wakes; what `stays` somewhere sleeps elsewhere, or nowhere."""
    memories = Memories(plan=plan)
    traced = traced_of(plan, memories)
    choice = choose(traced.trace)
    copies = [
        move_cost(plan, context, part, mode).seconds or 0.0
        for part, mode in zip(traced.parts, traced.modes, strict=True)
    ]
    seconds = [seconds_of(action) for action in plan.actions]
    naps = shortened(traced.trace, choice.stay, copies, seconds)
    slept = {traced.parts[nap.gap].name: traced.parts[nap.gap] for nap in naps}
    parts = (slept.get(part.name, replace(part, stays=())) for part in plan.parts)
    plan = replace(plan, parts=tuple(parts))
    plan = with_moves(_noting(plan, traced.trace, choice), traced, naps, context)
    plan = with_savers(plan, context.costs)
    if any(part.stays for part in slept.values()):
        memories = Memories(plan=plan)
    return plan, Instants(plan, memories)


def _needless(plan: Plan, instants: Instants) -> Part | None:
    """The first part that sleeps on some of its devices for nothing, made to stay there."""
    for name in instants.naps:
        part = plan.part(name)
        kinds: dict[tuple[int, ...], list[int]] = {}
        for devices in plan.instance(part.instance).processes:
            if not set(devices).intersection(part.stays):
                groups = tuple(dict.fromkeys(instants.memories.group[d] for d in devices))
                kinds.setdefault(groups, []).extend(devices)
        for groups, alike in kinds.items() if len(kinds) > 1 else ():
            if not instants.make_room(part, groups):
                stays = {*part.stays, *alike}
                return replace(part, stays=tuple(d for d in part.devices if d in stays))
    return None


def traced_of(plan: Plan, memories: Memories) -> Traced:
    """The trace of a plan without moves; parts that fit everywhere have no gaps."""
    groups = tuple(sorted(set(memories.group.values())))
    number = {group: index for index, group in enumerate(groups)}
    rings = tuple(_ring(plan, memories, group) for group in groups)
    short = {
        group
        for group, ring in zip(groups, rings, strict=True)
        if ring.spare < max(_transients(plan, ring), default=0)
    }
    users: dict[str, list[int]] = {}
    for place, action in enumerate(plan.actions):
        for name in action.needs:
            users.setdefault(name, []).append(place)
    gaps, parts, modes = [], [], []
    for part in plan.parts:
        size, places = leaving(part), users.get(part.name, [])
        if not (size and places) or short.isdisjoint(memories.of_part[part.name]):
            continue
        found = _staying(plan, part, memories, short)
        own = tuple(number[g] for g in dict.fromkeys(memories.group[d] for d in found.leaves))
        for since, until in zip(places, [*places[1:], places[0]], strict=True):
            rows = tuple((r, i) for r in own for i in _between(rings[r].places, since, until))
            mode = _mode(plan, part, plan.actions[until])
            cost = 0 if mode == "discard" else 2 * size * len(found.leaves)
            gaps.append(Gap(size=size, cost=cost, since=since, until=until, rings=own, rows=rows))
            parts.append(found)
            modes.append(mode)
    trace = Trace(length=len(plan.actions), rings=rings, gaps=tuple(gaps))
    return Traced(trace=trace, parts=tuple(parts), modes=tuple(modes))


def _staying(plan: Plan, part: Part, memories: Memories, short: Collection[int]) -> Part:
    """The part that sleeps where memory is short alone; of an engine, whole replicas."""
    stays: list[int] = []
    for devices in plan.instance(part.instance).processes:
        fits = not any(memories.group[d] in short for d in devices)
        stays += devices if fits or set(devices) <= set(part.stays) else []
    return replace(part, stays=tuple(stays))


def _ring(plan: Plan, memories: Memories, group: int) -> Ring:
    """The memory of a group of devices: what each action leaves to what it does not need."""
    parts = {part.name: part for part in plan.parts if group in memories.of_part[part.name]}
    parts = {name: part for name, part in parts.items() if group not in part.stays}
    resident = sum(leaving(part) for name, part in parts.items() if name in memories.used)
    spare = plan.budget(group) - memories.all_awake[group]
    places, rooms = [], []
    for place, action in enumerate(plan.actions):
        if group in memories.on[action.devices] and action.part is None:
            needed = sum(leaving(parts[name]) for name in action.needs if name in parts)
            places.append(place)
            rooms.append(spare + resident - needed - (action.cost.transient or 0))
    return Ring(rooms=tuple(rooms), places=tuple(places), spare=spare)


def _transients(plan: Plan, ring: Ring) -> list[int]:
    return [plan.actions[place].cost.transient or 0 for place in ring.places]


def _between(places: Sequence[int], since: int, until: int) -> list[int]:
    """The indices of the places after `since` and before `until`, around the cycle."""
    first, last = bisect_right(places, since), bisect_left(places, until)
    if since < until:
        return list(range(first, last))
    return [*range(first, len(places)), *range(last)]


def _mode(plan: Plan, part: Part, user: Action) -> Mode:
    """Discard what is made anew before anyone reads it; offload the rest.

    A reshard makes all weights of an instance anew where it is due in every iteration, but of a
    model with adapters only these.
    """
    adapters = plan.graph.model(plan.instance(part.instance).model).lora is not None
    filled = part.instance in user.targets and user.every == 1 and not adapters
    return "discard" if part.kind in ("gradients", "pool") or filled else "offload"


def _noting(plan: Plan, trace: Trace, choice: Choice) -> Plan:
    """How many bytes sleeps and wakes move, and whether fewer would do."""
    moved = trace.moved(choice.stay)
    if not moved:
        return plan
    text = f"sleeps and wakes move {amount(moved)} an iteration"
    if choice.proven:
        text += ", the fewest that memory allows"
    else:
        text += f"; by least recent use it would be {amount(trace.moved(lru(trace)))}"
    return plan.noting("residency", text)


def too_large(plan: Plan, memories: Memories) -> list[Finding]:
    """A finding for every action that does not fit with all that it does not need asleep."""
    found = []
    for action in plan.actions:
        worst = max(
            (_alone(plan, memories, action, group) for group in memories.on[action.devices]),
            key=lambda need: need.over,
            default=None,
        )
        if worst is not None and worst.over > 0:
            found.append(_does_not_fit(plan, action, worst))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What is on a device while an action runs by itself: (bytes, name), and the bytes too many."""

    device: int
    holders: tuple[tuple[int, str], ...]
    over: int


def _kept(part: Part) -> str:
    """What a part that is not needed holds: all of a cache, which stays from piece to piece."""
    return part.name if part.kind == "cache" else f"left by {part.name} asleep"


def _alone(plan: Plan, memories: Memories, action: Action, device: int) -> Alone:
    here = [part for part in plan.parts if device in memories.of_part[part.name]]
    needed = [((part.size or 0), part.name) for part in here if part.name in action.needs]
    asleep = [part for part in here if part.name not in action.needs]
    rest = [((p.size or 0) - leaving(p), _kept(p)) for p in asleep]
    used = sorted(((size, name) for name, size in action.cost.holds), reverse=True)
    other = (action.cost.transient or 0) - sum(size for size, _ in used)
    used.append((other, "otherwise" if used else "used while it runs"))
    holders = [*sorted(needed, reverse=True), *used, *sorted(rest, reverse=True)]
    total = sum(size for size, _ in holders)
    return Alone(
        device=device,
        holders=tuple((size, name) for size, name in holders if size),
        over=total - plan.budget(device),
    )


def _does_not_fit(plan: Plan, action: Action, need: Alone) -> Finding:
    rows = [f"{amount(size)} {name}" for size, name in need.holders]
    total = sum(size for size, _ in need.holders)
    return Finding(
        code="E401",
        what=f"action {action.id!r} does not fit on {device_name(plan, need.device)}",
        where=plan.graph.node(action.node).where if action.node else None,
        got=f"{amount(total)} at once while {action.id} runs:\n" + "\n".join(rows),
        expected=f"at most {amount(plan.budget(need.device))}, the memory of the device",
        fix="more devices in the pool, a smaller batch, or more mini_batches in the update",
    )


def _stated(plan: Plan, instants: Instants) -> Plan:
    """The plan with the peak of every action, device and host; E405 for a host that is too small.

    A host without a known size is not held to one.
    """
    size, move, holders = instants.host_peak()
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
    return Finding(
        code="E405",
        what=f"what sleeps does not fit in the memory of a host, {instant}",
        got=f"{amount(size)} at once:\n" + "\n".join(rows),
        expected=f"at most {amount(plan.budget(HOST))}, the memory of a host beside its devices",
        fix="pools of their own for some models, or more devices for each",
    )
