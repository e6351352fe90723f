"""A rule of the verifier: nothing sleeps that fits, nothing wakes unused, no weights are lost.

Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlflow.scheduler.facts import Facts
from rlflow.scheduler.plan import Action, Part
from rlflow.scheduler.verify_memory import Held, Spell, given_back, held_of, sleeping_on


def moves_are_needed(facts: Facts) -> Iterator[str]:
    """Each sleep makes room that is needed, each wake has a user, and both lose no weights."""
    held = held_of(facts)
    for part in facts.plan.parts:
        if part.stays and (part.name not in held.moves or not sleeping_on(part)):
            yield f"{part.name} stays on {list(part.stays)} and sleeps nowhere"
    for name, spells in held.spells.items():
        part = facts.parts[name]
        for spell in spells:
            a, inside = spell.opens, spell.inside
            if a.devices != sleeping_on(part):
                yield f"{a.id} runs on {list(a.devices)}, {name} on {list(sleeping_on(part))}"
            during = [b for b in facts.plan.actions if inside & facts.bit[b.id]]
            if a.kind == "wake" and not any(name in b.needs for b in during):
                yield f"{a.id} is useless: nobody needs {name} before it sleeps again"
            where = held.kinds[sleeping_on(part)]
            if a.kind == "sleep" and not _make_room(held, part, [spell], where):
                yield f"{a.id} is useless: {name} would have fitted until {spell.closes.id}"
            yield from _mode_is_right(facts, a, part)
        yield from _sleeps_are_needed_everywhere(held, part)


def _sleeps_are_needed_everywhere(held: Held, part: Part) -> Iterator[str]:
    """On each device, or of an engine for each replica, one sleep at least makes room."""
    sleeping, spells = set(sleeping_on(part)), held.spells[part.name]
    seen = set()
    for devices in held.facts.instances[part.instance].processes:
        where = tuple(dict.fromkeys(held.alike[d] for d in devices if d in sleeping))
        if where and where not in seen and not _make_room(held, part, spells, where):
            yield f"{part.name} sleeps on {list(devices)}, where it would have fitted"
        seen.add(where)


def _make_room(held: Held, part: Part, spells: Sequence[Spell], devices: Sequence[int]) -> bool:
    """Whether during one of its sleeps some action would not fit with a part awake beside it."""
    plan, bit = held.facts.plan, held.facts.bit
    asleep = 0
    for spell in spells:
        asleep |= spell.inside if spell.opens.kind == "sleep" else 0
    loads = [held.loads[a.id] for a in plan.actions if asleep & bit[a.id]]
    return any(
        device in load and load[device] + given_back(part) > plan.budget(device)
        for load in loads
        for device in devices
    )


def _mode_is_right(facts: Facts, a: Action, part: Part) -> Iterator[str]:
    """Discarded is what is made anew before anyone reads it, and only that.

    That is all gradients and pools, and the weights that a reshard of every iteration fills
    next, of a model whose adapters are not all that it sends.
    """
    at = list(facts.actions).index(a.id)
    following = (*facts.plan.actions[at + 1 :], *facts.plan.actions[:at])
    user = next((b for b in following if part.name in b.needs), None)
    model = facts.plan.graph.model(facts.instances[part.instance].model)
    filled = user is not None and part.instance in user.targets and user.every == 1
    filled = filled and model.lora is None
    anew = part.kind in ("gradients", "pool") or filled
    if (a.mode == "discard") is not anew:
        after = f"{user.id} is next to use it" if user else "nobody uses it"
        yield f"{a.id} is marked {a.mode}, and {after}"
