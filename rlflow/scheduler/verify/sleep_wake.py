"""A rule of the verifier: nothing sleeps that fits, nothing wakes unused, no weights are lost.

Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from rlflow.scheduler.plan.plan import Action, Part
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.lanes import Line, given_back
from rlflow.scheduler.verify.memory import Memory, leaving, memory_of


def moves_are_needed(facts: Facts) -> Iterator[str]:
    """Each sleep makes room that is needed, each wake has a user, and both lose no weights."""
    memory = memory_of(facts)
    users: dict[str, list[int]] = {}
    for place, action in enumerate(facts.plan.actions):
        for need in action.needs:
            users.setdefault(need, []).append(place)
    for part in facts.plan.parts:
        if part.stays and (part.name not in memory.moves or not leaving(part)):
            yield f"{part.name} stays on {list(part.stays)} and sleeps nowhere"
    for name, moves in memory.moves.items():
        part, places = facts.parts[name], users.get(name, [])
        own = [facts.plan.actions[place] for place in places]
        for number, a in enumerate(moves):
            after = moves[(number + 1) % len(moves)]
            if a.devices != leaving(part):
                yield f"{a.id} runs on {list(a.devices)}, {name} on {list(leaving(part))}"
            if a.kind == "wake" and not _is_used(memory, part, after, own):
                yield f"{a.id} is useless: nobody needs {name} before it sleeps again"
            if a.kind == "sleep" and not _makes_room(memory.on(leaving(part)), part, a):
                yield f"{a.id} is useless: {name} would have fitted until {after.id}"
            yield from _mode_is_right(facts, a, part, places)
        yield from _sleeps_are_needed_everywhere(memory, part)


def gradients_stay(facts: Facts) -> Iterator[str]:
    """What the chunks of an optimizer step add up is on its devices from the first to the last.

    Another step of the same optimizer between them would take it, so there is none.
    """
    for name in sorted(facts.added_to):
        instance = facts.instances[name]
        for a in facts.plan.actions:
            if a.part == instance.gradients:
                yield f"{a.id} moves gradients that chunks of an update add up"
        nodes = {node.name for node in facts.plan.graph.updates(instance.model)}
        if len(nodes) > 1:
            yield f"{', '.join(sorted(nodes))} add up gradients of {name} in turns"


def _is_used(memory: Memory, part: Part, sleep: Action, users: Iterable[Action]) -> bool:
    """Whether an action needs a part, always before one of its sleeps and after the wake before."""
    lines = memory.on(leaving(part))
    return any(line.sleeps_from(part.name, user.id) is sleep for user in users for line in lines)


def _makes_room(lines: Iterable[Line], part: Part, sleep: Action | None = None) -> bool:
    """Whether during a sleep of a part, or any, some action would not fit with it awake beside."""
    for line in lines:
        places = line.places.get(part.name, [])
        for number, place in enumerate(places):
            found = line.moves[place]
            if found.kind != "sleep" or sleep not in (None, found):
                continue
            last = number + 1 == len(places)
            wake = places[0] + len(line.moves) if last else places[number + 1]
            if line.is_short(place, wake, given_back(part)):
                return True
    return False


def _sleeps_are_needed_everywhere(memory: Memory, part: Part) -> Iterator[str]:
    """On each device, or of an engine for each replica, one sleep at least makes room."""
    sleeping = set(leaving(part))
    seen = set()
    for devices in memory.facts.instances[part.instance].processes:
        where = tuple(dict.fromkeys(memory.kind[d] for d in devices if d in sleeping))
        if where and where not in seen and not _makes_room(memory.on(where), part):
            yield f"{part.name} sleeps on {list(devices)}, where it would have fitted"
        seen.add(where)


def _mode_is_right(facts: Facts, a: Action, part: Part, users: list[int]) -> Iterator[str]:
    """Discarded is what is made anew before anyone reads it, and only that.

    That is all gradients and pools, and the weights that a reshard of every iteration fills
    next, of a model of which it sends more than adapters, and frozen parts as well.
    """
    user = None
    if users:
        following = bisect_right(users, facts.number[a.id]) % len(users)
        user = facts.plan.actions[users[following]]
    instance = facts.instances[part.instance]
    model = facts.plan.graph.model(instance.model)
    filled = user is not None and part.instance in user.targets and user.always
    engine = instance.options is not None or instance.inside is not None
    filled = filled and model.lora is None and (engine or not model.freeze)
    anew = part.kind in ("gradients", "pool") or filled
    if (a.mode == "discard") is not anew:
        after = f"{user.id} is next to use it" if user else "nobody uses it"
        yield f"{a.id} is marked {a.mode}, and {after}"
