"""Rules of the verifier: the order of actions, turns on devices, memory, time.

Knows the plan; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from rlflow.scheduler.facts import Facts
from rlflow.scheduler.plan import HOST, Action, Part

TOLERANCE = 1e-6


def list_is_an_order(facts: Facts) -> Iterator[str]:
    """Each action is listed after those of its iteration that it waits for."""
    seen: set[str] = set()
    for a in facts.plan.actions:
        for dep in a.after:
            if dep.distance == 0 and dep.action not in seen:
                yield f"{a.id} is listed before {dep.action}, which it waits for"
        seen.add(a.id)


def memory_fits(facts: Facts) -> Iterator[str]:
    """Nothing is used asleep, no device is ever over budget, and the peaks are as stated."""
    plan, replay = facts.plan, facts.replay
    yield from replay.broken
    peaks = {device: 0 for devices in plan.pools.values() for device in devices}
    for a, load in zip(plan.actions, replay.loads, strict=True):
        away = {d for need in a.needs for d in facts.parts[need].devices}.difference(a.devices)
        if away:
            yield f"{a.id} needs parts on devices {sorted(away)}, which it does not take"
        for device, size in load.items():
            peaks[device] = max(peaks[device], size)
            if size > plan.budget(device):
                yield f"{a.id} holds {size} bytes on device {device}, the budget is {plan.budget(device)}"
        peak = max(load.values(), default=None)
        if a.peak != peak:
            yield f"{a.id} states a peak of {a.peak} bytes, it is {peak}"
    if dict(plan.peaks) != peaks:
        yield f"the plan states peaks of {dict(plan.peaks)}, they are {peaks}"


def moves_are_needed(facts: Facts) -> Iterator[str]:
    """Each sleep makes room that is needed, each wake has a user, and both lose no weights."""
    actions, count = facts.plan.actions, len(facts.plan.actions)
    for index, a in enumerate(actions):
        if a.kind not in ("sleep", "wake"):
            continue
        part = facts.parts[str(a.part)]
        if a.devices != part.devices:
            yield f"{a.id} runs on {list(a.devices)}, {part.name} is on {list(part.devices)}"
        following = [(index + ahead) % count for ahead in range(1, count)]
        back = next((n for n in following if actions[n].part == part.name), index)
        until = following[: (back - index - 1) % count]
        used = any(part.name in actions[n].needs for n in until)
        if a.kind == "wake" and not used:
            yield f"{a.id} is useless: nobody needs {part.name} before it sleeps again"
        held = facts.replay.most(until, part.devices)
        if a.kind == "sleep" and held + (part.size or 0) <= facts.plan.budget(part.devices[0]):
            yield f"{a.id} is useless: {part.name} would have fitted until {actions[back].id}"
        yield from _mode_is_right(facts, a, part, following)


def _mode_is_right(facts: Facts, a: Action, part: Part, following: list[int]) -> Iterator[str]:
    """Discarded is what is made anew before anyone reads it, and only that.

    That is all gradients, and the weights that a reshard fills next, of a model whose
    adapters are not all that it sends.
    """
    actions = facts.plan.actions
    user = next((actions[n] for n in following if part.name in actions[n].needs), None)
    model = facts.plan.graph.model(facts.instances[part.instance].model)
    filled = user is not None and part.instance in user.targets and model.lora is None
    anew = part.kind == "gradients" or filled
    if (a.mode == "discard") is not anew:
        after = f"{user.id} is next to use it" if user else "nobody uses it"
        yield f"{a.id} is marked {a.mode}, and {after}"


def devices_take_turns(facts: Facts) -> Iterator[str]:
    """On each device an action is over before the next one starts, around the iteration too."""
    for (device, _), queue in sorted(facts.queues.items()):
        turns = [*pairwise(queue), (queue[-1], queue[0])]
        for number, (before, after) in enumerate(turns, 1):
            if not facts.precedes(before, after, 1 if number == len(turns) else 0):
                place = "the host" if device == HOST else f"device {device}"
                yield f"{before} and {after} may run on {place} at the same time"


def communicators_are_alone(facts: Facts) -> Iterator[str]:
    """Of two actions whose ranks meet in collectives on one device, one is over first, always.

    Ranks that enter two collectives in different orders wait for each other for ever.
    """
    meeting = [a for a in facts.plan.actions if facts.meets(a)]
    for one, other in combinations(meeting, 2):
        shared = sorted(set(one.devices) & set(other.devices))
        in_turn = facts.precedes(one.id, other.id, 0) and facts.precedes(other.id, one.id, 1)
        if shared and not in_turn:
            yield f"{one.id} and {other.id} may be in flight together on devices {shared}"
    for a in meeting:
        if not facts.precedes(a.id, a.id, 1):
            yield f"{a.id} of two iterations may be in flight together"


def time_adds_up(facts: Facts) -> Iterator[str]:
    """The period is stated where every cost is known, and is not below what bounds it."""
    timing = facts.plan.timing
    known = all(action.cost.seconds is not None for action in facts.plan.actions)
    if (timing is not None) != known:
        yield "timing is stated for unknown costs" if timing else "no timing is stated"
    elif timing is None:
        return
    elif timing.period < max(timing.resource_bound, timing.recurrence_bound) * (1 - TOLERANCE):
        yield (
            f"the period is {timing.period:g} s, below its bounds {timing.resource_bound:g} s "
            f"and {timing.recurrence_bound:g} s"
        )
