"""Passes `order` and `chain`: the cyclic order of actions, and its explicit form.

`order` is list scheduling by critical path over devices that hold one exclusive action
at a time (Graham 1969), ties broken by the order declared. `chain` writes the order
on every device as dependencies, so that an executor needs to decide nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Action, Dep, Plan, Timing

UNKNOWN_SECONDS = 1.0
WARM_UP = 8
WINDOW = 8


def seconds_of(action: Action) -> float:
    """Estimated seconds per iteration; an action every n iterations counts an nth."""
    seconds = action.cost.seconds
    return (UNKNOWN_SECONDS if seconds is None else seconds) / action.every


def order(plan: Plan, context: Context) -> Plan:
    """Put the actions in the order in which one iteration would run them."""
    rank = {action.id: index for index, action in enumerate(plan.actions)}
    followers: dict[str, list[str]] = {action.id: [] for action in plan.actions}
    waiting: dict[str, int] = {}
    for action in plan.actions:
        sources = {dep.action for dep in action.after if dep.distance == 0}
        waiting[action.id] = len(sources)
        for source in sources:
            followers[source].append(action.id)
    urgency = _critical_path(plan, followers)
    ready = [name for name, count in waiting.items() if count == 0]
    free: dict[int, float] = {}
    running: list[tuple[float, int, str]] = []
    started: list[tuple[float, int, str]] = []
    now = 0.0
    while ready or running:
        ready.sort(key=lambda name: (-urgency[name], rank[name]))
        for name in list(ready):
            action = plan.action(name)
            if all(free.get(device, 0.0) <= now for device in action.devices):
                end = now + seconds_of(action)
                free.update(dict.fromkeys(action.devices, end))
                heapq.heappush(running, (end, rank[name], name))
                started.append((now, len(started), name))
                ready.remove(name)
        now, _, done = heapq.heappop(running)
        for follower in followers[done]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return replace(plan, actions=tuple(plan.action(name) for _, _, name in started))


def _critical_path(plan: Plan, followers: dict[str, list[str]]) -> dict[str, float]:
    """Seconds from the start of each action to the end of the iteration."""
    urgency: dict[str, float] = {}
    stack = [action.id for action in plan.actions]
    while stack:
        name = stack[-1]
        pending = [f for f in followers[name] if f not in urgency]
        if name in urgency or not pending:
            stack.pop()
            longest = max((urgency[f] for f in followers[name]), default=0.0)
            urgency[name] = longest + seconds_of(plan.action(name))
        else:
            stack.extend(pending)
    return urgency


def chain(plan: Plan, context: Context) -> Plan:
    """Write each device's order as dependencies: the action before, and last turn's last one."""
    last: dict[int, str] = {}
    first: dict[int, str] = {}
    extra: dict[str, list[Dep]] = {action.id: [] for action in plan.actions}
    for action in plan.actions:
        for device in action.devices:
            if device in last:
                extra[action.id].append(Dep(action=last[device], distance=0, kind="device"))
            first.setdefault(device, action.id)
            last[device] = action.id
    for device, name in first.items():
        extra[name].append(Dep(action=last[device], distance=1, kind="device"))
    return replace(plan, actions=tuple(_with_deps(a, extra[a.id]) for a in plan.actions))


def _with_deps(action: Action, extra: list[Dep]) -> Action:
    """Add the dependencies that do not repeat one the action already has."""
    known = {(dep.action, dep.distance) for dep in action.after}
    added = []
    for dep in extra:
        if (dep.action, dep.distance) not in known:
            known.add((dep.action, dep.distance))
            added.append(dep)
    return replace(action, after=(*action.after, *added))


def timing(plan: Plan, context: Context) -> Plan:
    """Bounds on the period and the period achieved; none where an action's cost is unknown."""
    if any(action.cost.seconds is None for action in plan.actions):
        return plan
    busy: dict[int, float] = {}
    for action in plan.actions:
        for device in action.devices:
            busy[device] = busy.get(device, 0.0) + seconds_of(action)
    busiest = max(busy, key=lambda device: (busy[device], -device))
    resource = busy[busiest]
    recurrence = _growth(plan, with_devices=False)
    period = max(_growth(plan, with_devices=True), resource, recurrence)
    binding = "order"
    if period <= resource * (1 + 1e-6):
        binding = "resource"
    elif period <= recurrence * (1 + 1e-6):
        binding = "recurrence"
    found = Timing(
        resource_bound=resource,
        recurrence_bound=recurrence,
        period=period,
        busiest=device_name(plan, busiest),
        binding=binding,  # type: ignore[arg-type]
    )
    return replace(plan, timing=found)


def device_name(plan: Plan, device: int) -> str:
    """A device as it is printed: its pools and number."""
    if device < 0:
        return "host"
    pools = [name for name, devices in plan.pools.items() if device in devices]
    return f"{'/'.join(pools) or 'device'}[{device}]"


def _growth(plan: Plan, with_devices: bool) -> float:
    """Seconds an iteration adds once the plan is in its stride: played on a virtual clock.

    The growth of a max-plus system is the largest cycle mean of its graph (Baccelli et
    al. 1992, theorem 3.23).
    """
    finish: dict[str, list[float]] = {action.id: [] for action in plan.actions}
    ends = []
    for iteration in range(WARM_UP + WINDOW):
        for action in plan.actions:
            start = 0.0
            for dep in action.after:
                if (with_devices or dep.kind != "device") and dep.distance <= iteration:
                    start = max(start, finish[dep.action][iteration - dep.distance])
            finish[action.id].append(start + seconds_of(action))
        ends.append(max(times[iteration] for times in finish.values()))
    return (ends[-1] - ends[WARM_UP - 1]) / WINDOW
