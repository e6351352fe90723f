"""Rules of the verifier: actions take turns, and the period stated is that of the slowest cycle.

Knows the plan; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rlflow.scheduler.plan.plan import HOST, Action, Timing
from rlflow.scheduler.verify.happens_before import Facts

TOLERANCE = 1e-6


def list_is_an_order(facts: Facts) -> Iterator[str]:
    """Each action is listed after those of its turn that it waits for."""
    seen: set[str] = set()
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.distance == 0 and dep.action not in seen:
                yield f"{a.id} is listed before {dep.action}, which it waits for"
        seen.add(a.id)


def devices_take_turns(facts: Facts) -> Iterator[str]:
    """On each lane of a device an action is over before the next starts, around the turn too."""
    alike: dict[int, None] = {}
    for (device, lane), queue in sorted(facts.queues.items()):
        if id(queue) in alike:
            continue
        alike[id(queue)] = None
        for before, after, turns in _around(queue):
            if not facts.precedes(before, after, turns):
                place = "the host" if device == HOST else f"device {device}"
                place += "'s copies" if lane == "copy" else ""
                yield f"{before} and {after} may run on {place} at the same time"


def communicators_are_alone(facts: Facts) -> Iterator[str]:
    """Of two actions whose ranks meet in collectives on one device, one is over first, always.

    Ranks that enter two collectives in different orders wait for each other for ever. Neighbours
    are enough: that one is over before another starts holds of all between whom it does step by
    step.
    """
    meeting = {a.id for a in facts.plan.actions if facts.meets(a)}
    queues = {id(queue): queue for queue in facts.queues.values()}
    found: dict[tuple[str, str], None] = {}
    for queue in queues.values():
        for before, after, turns in _around([name for name in queue if name in meeting]):
            if before != after and not facts.precedes(before, after, turns):
                found[before, after] = None
    for before, after in found:
        shared = set(facts.actions[before].devices) & set(facts.actions[after].devices)
        yield f"{before} and {after} may be in flight together on devices {sorted(shared)}"
    for a in facts.plan.actions:
        if a.id in meeting and not facts.precedes(a.id, a.id, 1):
            yield f"{a.id} of two iterations may be in flight together"


def _around(queue: list[str] | tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
    """Neighbours of a queue, and in how many turns the second follows: the first after the last."""
    yield from ((before, after, 0) for before, after in pairwise(queue))
    if queue:
        yield queue[-1], queue[0], 1


def time_adds_up(facts: Facts) -> Iterator[str]:
    """A period is stated where all costs are known, that of the critical cycle; none is slower."""
    timing = facts.plan.timing
    known = all(action.cost.seconds is not None for action in facts.plan.actions)
    if (timing is not None) != known:
        yield "timing is stated for unknown costs" if timing else "no timing is stated"
    elif timing is not None:
        yield from _period_is_right(facts, timing)


def _period_is_right(facts: Facts, timing: Timing) -> Iterator[str]:
    bound = max(timing.resource_bound, timing.recurrence_bound)
    if timing.period < bound * (1 - TOLERANCE):
        yield (
            f"the period is {timing.period:g} s, below its bounds {timing.resource_bound:g} s "
            f"and {timing.recurrence_bound:g} s"
        )
    if timing.binding == "order" and timing.period <= bound * (1 + TOLERANCE):
        yield f"the period of {timing.period:g} s is its bound, and the order is said to bind"
    differs = any(action.cost.swings for action in facts.plan.actions)
    if differs != bool(timing.played) or (differs and timing.played < timing.period):
        yield f"{timing.played:g} s are played, of a period of means of {timing.period:g} s"
    unknown = sorted({*timing.critical, *(n for n, _ in timing.slack)}.difference(facts.actions))
    if unknown:
        yield f"timing names {', '.join(unknown)}, which the plan does not have"
        return
    if not _settles(facts, timing.period):
        yield f"a cycle takes longer than the period of {timing.period:g} s"
    ratio = _ratio(facts, timing.critical)
    if ratio is None:
        yield f"{', '.join(timing.critical) or 'nothing'} is no cycle of what waits for what"
    elif abs(ratio - timing.period) > TOLERANCE * timing.period:
        yield f"the critical cycle takes {ratio:g} s a turn, the period is {timing.period:g} s"
    slack = dict(timing.slack)
    for name, seconds in timing.slack:
        if seconds < 0:
            yield f"{name} has {seconds:g} s of slack"
    for name in timing.critical:
        if slack.get(name, 0.0) > TOLERANCE * timing.period:
            yield f"{name} is critical and has {slack[name]:g} s of slack"
    runs = [a for a in facts.plan.actions if a.kind == "run" and a.always and not a.on_host]
    longest = max((_seconds(action) for action in runs), default=0.0)
    if timing.latency < longest * (1 - TOLERANCE):
        yield f"an iteration takes {timing.latency:g} s, one of its runs {longest:g} s"


def _seconds(action: Action) -> float:
    """Seconds a turn: an action that is due every n iterations takes an nth."""
    return (action.cost.seconds or 0.0) * action.chance / action.every


def _settles(facts: Facts, period: float) -> bool:
    """Whether starts exist at that period that every dependency allows (Bellman and Ford)."""
    actions = facts.plan.actions
    starts = {action.id: 0.0 for action in actions}
    near = TOLERANCE * period
    waits = [
        (dep.action, action.id, facts.actions[dep.action], dep.distance)
        for action in actions
        for dep in action.after
    ]
    arcs = [(one, two, _seconds(source) - period * turns) for one, two, source, turns in waits]
    for _ in range(len(actions) + 1):
        changed = False
        for one, two, weight in arcs:
            if starts[one] + weight > starts[two] + near:
                starts[two] = starts[one] + weight
                changed = True
        if not changed:
            return True
    return False


def _ratio(facts: Facts, cycle: tuple[str, ...]) -> float | None:
    """Seconds a turn of a cycle of dependencies; None where one of its arcs is none.

    An action of the next turn comes after itself.
    """
    if not cycle:
        return None
    turns = 0
    for before, after in [*pairwise(cycle), (cycle[-1], cycle[0])]:
        found = [dep.distance for dep in facts.actions[after].after if dep.action == before]
        found += [1] if before == after else []
        if not found:
            return None
        turns += min(found)
    total = sum(_seconds(facts.actions[name]) for name in cycle)
    return total / turns if turns else None
