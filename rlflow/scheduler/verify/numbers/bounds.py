"""Rule of the verifier: bounds of the period are bounds, and are reached by what they are told of.

Knows the plan; shares no code with the passes or with the search for a period.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from rlflow.scheduler.plan.plan import HOST, Action, Lane, Plan, Timing
from rlflow.scheduler.verify.happens_before import Facts

TOLERANCE = 1e-6
# Slack is told of every action, and looked after in plans of so many.
FEW = 64

Arc = tuple[int, int, float]


def bounds_are_right(facts: Facts) -> Iterator[str]:
    """The resource bound is the busiest lane's work, the recurrence bound the slowest cycle's.

    A cycle counts that has no order of a device in it. No action has more slack than a cycle
    through it leaves, and an iteration takes as long as a chain within it.
    """
    timing = facts.plan.timing
    if timing is None or any(a.cost.seconds is None for a in facts.plan.actions):
        return
    seconds = [(a.cost.seconds or 0.0) * a.chance / a.every for a in facts.plan.actions]
    near = TOLERANCE * max(timing.period, *seconds, 0.0)
    yield from _lanes_are_right(facts, timing, seconds, near)
    yield from _recurrence_is_right(facts, timing, seconds, near)
    yield from _binding_is_right(timing, near)
    yield from _slack_is_there(facts, timing, seconds, near)
    chain = _longest_chain(facts, seconds)
    if timing.latency < chain - near:
        yield f"an iteration takes {timing.latency:g} s, a chain in it {chain:g} s"


def lane_name(plan: Plan, device: int, lane: Lane) -> str:
    """A lane in words: pools and number of its device, `host`, and whether it is that of copies."""
    pools = [name for name, devices in plan.pools.items() if device in devices]
    name = "host" if device == HOST else f"{'/'.join(pools) or 'device'}[{device}]"
    return name + (" copies" if lane == "copy" else "")


def _lanes_are_right(
    facts: Facts, timing: Timing, seconds: Sequence[float], near: float
) -> Iterator[str]:
    """The busiest lane is one of those with the most to do, and the bound is what it has to do."""
    number, known = facts.number, dict[int, float]()
    work = {}
    for lane, queue in facts.queues.items():
        if id(queue) not in known:
            known[id(queue)] = sum(seconds[number[name]] for name in queue)
        work[lane_name(facts.plan, *lane)] = known[id(queue)]
    most = max(work.values(), default=0.0)
    if abs(timing.resource_bound - most) > near:
        yield f"the resource bound is {timing.resource_bound:g} s, a lane works {most:g} s a turn"
    if most > near and work.get(timing.busiest, 0.0) < most - near:
        yield f"{timing.busiest} is said to be busiest, and another lane works {most:g} s a turn"


def _recurrence_is_right(
    facts: Facts, timing: Timing, seconds: Sequence[float], near: float
) -> Iterator[str]:
    """No cycle of dependencies is slower than the recurrence bound, and one is as slow."""
    number, bound = facts.number, timing.recurrence_bound
    arcs = [
        (number[dep.action], number[a.id], dep.distance)
        for a in facts.plan.actions
        for dep in a.after
        if dep.kind != "device"
    ]
    places = {name: place for place, name in enumerate(facts.sorted_ids)}
    ids = [a.id for a in facts.plan.actions]
    arcs.sort(key=lambda arc: places.get(ids[arc[0]], 0))

    def slower(period: float) -> bool:
        weighed = [(one, two, seconds[one] - period * turns) for one, two, turns in arcs]
        return _has_cycle(weighed, len(ids), near / (1 + len(ids)))

    if bound < 0 or slower(bound + near):
        yield f"a cycle takes longer than the recurrence bound of {bound:g} s"
    elif bound > near and not slower(bound - 2 * near):
        yield f"no cycle takes as long as the recurrence bound of {bound:g} s"


def _has_cycle(arcs: Sequence[Arc], count: int, near: float) -> bool:
    """Whether a cycle of arcs weighs more than nothing (Bellman and Ford, looking at parents)."""
    longest, parent = [0.0] * count, [-1] * count
    for _ in range(count + 1):
        changed = False
        for one, two, weight in arcs:
            if longest[one] + weight > longest[two] + near:
                longest[two], parent[two] = longest[one] + weight, one
                changed = True
        if not changed:
            return False
        if _goes_round(parent):
            return True
    return True


def _goes_round(parent: Sequence[int]) -> bool:
    """Whether following parents leads back to where it began, from anywhere."""
    seen = [0] * len(parent)
    for number, start in enumerate(range(len(parent)), 1):
        at = start
        while at >= 0 and not seen[at]:
            seen[at] = number
            at = parent[at]
        if at >= 0 and seen[at] == number:
            return True
    return False


def _binding_is_right(timing: Timing, near: float) -> Iterator[str]:
    """What binds is the first bound that the period reaches, or else the order."""
    bounds = {"resource": timing.resource_bound, "recurrence": timing.recurrence_bound}
    over = {name: timing.period - bound for name, bound in bounds.items()}
    names = (*bounds, "order")
    earlier = names[: names.index(timing.binding)]
    for name in earlier:
        if over[name] < near / 2:
            yield f"{timing.binding} is said to bind the period, which is the {name} bound"
    if over.get(timing.binding, 0.0) > 2 * near:
        yield f"{timing.binding} is said to bind the period, which is longer"


def _slack_is_there(
    facts: Facts, timing: Timing, seconds: Sequence[float], near: float
) -> Iterator[str]:
    """Slack is told of each action once, and is no more than what its cycles leave it."""
    told, ids = dict(timing.slack), [a.id for a in facts.plan.actions]
    if sorted(name for name, _ in timing.slack) != sorted(ids):
        yield f"slack is told of {len(timing.slack)} actions, there are {len(ids)}"
    elif len(ids) <= FEW:
        for name, most in zip(ids, _slacks(facts, timing.period, seconds), strict=True):
            if told[name] > most + near * len(ids):
                yield f"{name} is told {told[name]:g} s of slack, a cycle leaves it {most:g} s"


def _slacks(facts: Facts, period: float, seconds: Sequence[float]) -> list[float]:
    """What the period leaves to the tightest cycle through each action, in the plan's order.

    At starts that all dependencies allow every arc has room, and a cycle as much as its arcs: the
    least of it is a shortest path back (Dijkstra).
    """
    number, count = facts.number, len(seconds)
    waits = [
        (number[dep.action], number[a.id], seconds[number[dep.action]] - period * dep.distance)
        for a in facts.plan.actions
        for dep in a.after
    ]
    waits += [(place, place, seconds[place] - period) for place in range(count)]
    starts = [0.0] * count
    for _ in range(count + 1):
        before = starts.copy()
        for one, two, weight in waits:
            starts[two] = max(starts[two], starts[one] + weight)
        if starts == before:
            break
    out: list[list[tuple[int, float]]] = [[] for _ in seconds]
    for one, two, weight in waits:
        out[one].append((two, max(starts[two] - starts[one] - weight, 0.0)))
    return [_way_back(out, place) for place in range(count)]


def _way_back(out: Sequence[Sequence[tuple[int, float]]], start: int) -> float:
    """The shortest way from a place back to it."""
    heap: list[tuple[float, int]] = []
    for other, room in out[start]:
        heappush(heap, (room, other))
    seen: set[int] = set()
    while heap:
        length, at = heappop(heap)
        if at == start:
            return length
        if at in seen:
            continue
        seen.add(at)
        for other, room in out[at]:
            if other not in seen:
                heappush(heap, (length + room, other))
    return inf


def _longest_chain(facts: Facts, seconds: Sequence[float]) -> float:
    """Seconds from the start of a run on a device to the end of one of its iteration after it.

    Of runs in every iteration. What an action waits for in its own iteration is ahead of it by as
    many turns as the distance says, so that those furthest ahead come first.
    """
    place = {name: number for number, name in enumerate(facts.sorted_ids)}
    actions = sorted(facts.plan.actions, key=lambda a: (-a.ahead, place.get(a.id, 0)))
    since: dict[str, float] = {}
    longest = 0.0
    for a in actions:
        found = [
            since[dep.action]
            for dep in a.after
            if dep.action in since and _same_iteration(facts, a, dep.action, dep.distance)
        ]
        counted = a.kind == "run" and a.always and not a.on_host
        begun = max(found, default=0.0 if counted else -inf)
        begun = max(begun, 0.0) if counted else begun
        if begun >= 0:
            since[a.id] = begun + seconds[facts.number[a.id]]
            longest = max(longest, since[a.id] if counted else 0.0)
    return longest


def _same_iteration(facts: Facts, a: Action, other: str, turns: int) -> bool:
    return turns + a.ahead - facts.actions[other].ahead == 0
