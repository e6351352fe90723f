"""Plans that lie in one number, or one word, and agree with themselves in all that follows from it.

Peaks are those of the sizes that are told, and what moves with a part is what it says it is: no
two figures that the plan's own sums connect contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from rlflow.scheduler.plan.plan import Action, Cost, Part, Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.lanes import given_back
from rlflow.scheduler.verify.memory import leaving, memory_of
from tests.scheduler.mutants import with_action

FACTORS = (0.5, 2)
Lie = tuple[str, Callable[[], Plan]]
"""What is lied about, and what makes the plan that does."""


def restated(plan: Plan) -> Plan:
    """The plan with the peaks, and the bytes of its offloads, that its sizes amount to."""
    parts = {part.name: part for part in plan.parts}

    def moving(a: Action) -> Action:
        if a.mode != "offload":
            return a
        part = parts[str(a.part)]
        moved = given_back(part) * len(leaving(part))
        return replace(a, cost=replace(a.cost, moved=moved))

    plan = replace(plan, actions=tuple(map(moving, plan.actions)))
    memory = memory_of(Facts(plan=plan))
    actions = tuple(replace(a, peak=memory.peak(a)) for a in plan.actions)
    return replace(plan, actions=actions, peaks=memory.stated)


def with_part(plan: Plan, name: str, **changes: object) -> Plan:
    """The plan with one part changed, and all that is added up of it."""
    parts = (replace(p, **changes) if p.name == name else p for p in plan.parts)
    return restated(replace(plan, parts=tuple(parts)))


def with_cost(plan: Plan, action: Action, **changes: object) -> Plan:
    """The plan with the cost of one action changed, and the peaks that follow from it."""
    return restated(with_action(plan, action.id, cost=replace(action.cost, **changes)))


def others(known: object, *figures: object) -> list[object]:
    """Of some figures those that are not the one that is known, each once."""
    return [each for each in dict.fromkeys(figures) if each != known]


def lies(plan: Plan) -> Iterator[Lie]:
    """Every lie of every kind."""
    for kind in KINDS.values():
        yield from kind(plan)


def sizes(plan: Plan) -> Iterator[Lie]:
    """A part of half its size or twice that, of none, or of nobody knows how much."""
    for part in plan.parts:
        if not part.size:
            continue
        for times in FACTORS:
            lie = partial(with_part, plan, part.name, **scaled(part, int(part.size * times)))
            yield f"{part.name} x {times}", lie
        nothing = scaled(part, 0)
        yield f"{part.name} of nothing", partial(with_part, plan, part.name, **nothing)
        unknown = {**nothing, "size": None, "residual": 0, "holds": ()}
        yield f"{part.name} unknown", partial(with_part, plan, part.name, **unknown)


def scaled(part: Part, size: int) -> dict[str, object]:
    """A part of another size, and what it leaves and what it holds of that."""
    changes: dict[str, object] = {"size": size}
    if part.residual == part.size:
        changes["residual"] = size
    if part.holds:
        (first, held), *rest = part.holds
        held += size - (part.size or 0)
        holds = ((first, max(held, 0)), *rest)
        changes |= {"holds": holds, "size": sum(each for _, each in holds)}
    return changes


def left_behind(plan: Plan) -> Iterator[Lie]:
    """A part that leaves another share of itself on its devices, or on its host."""
    for part in plan.parts:
        size, moves = part.size or 0, any(a.part == part.name for a in plan.actions)
        for residual in others(part.residual, 0, size // 2, size) if moves else ():
            lie = partial(with_part, plan, part.name, residual=residual)
            yield f"{part.name} leaves {residual}", lie
        for on_host in others(part.on_host, 0, part.on_host // 2, 2 * part.on_host, size):
            lie = partial(with_part, plan, part.name, on_host=on_host)
            yield f"{part.name} has {on_host} on its host", lie
        if part.more_on_host or part.on_host:
            more = () if part.more_on_host else ((part.devices[0], part.on_host),)
            lie = partial(with_part, plan, part.name, more_on_host=more)
            yield f"{part.name} has {more} more", lie
        if part.holds:
            (first, held), (second, beside), *rest = part.holds
            shifted = (first, held - beside // 2), (second, beside + beside // 2), *rest
            lie = partial(with_part, plan, part.name, holds=shifted)
            yield f"{part.name} holds {shifted}", lie
    for kept in plan.kept:
        for size in (kept.size // 2, kept.size * 2):
            every = tuple(replace(k, size=size) if k == kept else k for k in plan.kept)
            yield f"{kept.node} keeps {size}", partial(restated, replace(plan, kept=every))


def moved(plan: Plan) -> Iterator[Lie]:
    """Bytes that an action moves: half of them, twice as many, none, or some where none do."""
    for a in plan.actions:
        known = a.cost.moved or 0
        for size in others(a.cost.moved, 0, known // 2, 2 * known, 1 << 20, None):
            lie = partial(with_action, plan, a.id, cost=replace(a.cost, moved=size))
            yield f"{a.id} moves {size}", lie


def working(plan: Plan) -> Iterator[Lie]:
    """Memory that an action takes while it runs: none, more, or of other things than it holds."""
    for a in plan.actions:
        known = a.cost.transient or 0
        if known:
            nothing = partial(with_cost, plan, a, transient=0, holds=())
            yield f"{a.id} works in nothing", nothing
            yield f"{a.id} holds nothing of it", partial(with_cost, plan, a, holds=())
            yield f"{a.id} works in half", partial(with_cost, plan, a, transient=known // 2)
        else:
            lie = partial(with_cost, plan, a, transient=1, holds=(("scratch", 1),))
            yield f"{a.id} works in a byte", lie
        if a.chunk is not None and a.cost.holds:
            lie = partial(with_cost, plan, a, **doubled(a.cost))
            yield f"{a.id} works in twice as much", lie


def doubled(cost: Cost) -> dict[str, object]:
    """A cost with twice the memory, all of it."""
    holds = tuple((what, 2 * size) for what, size in cost.holds)
    return {"holds": holds, "transient": 2 * (cost.transient or 0)}


def seconds(plan: Plan) -> Iterator[Lie]:
    """Chances that loops do not give, and seconds that no clock shows."""
    for a in plan.actions:
        for chance in others(a.chance, 0.0, 0.25, 1.0, 1.5):
            lie = partial(with_action, plan, a.id, chance=chance)
            yield f"{a.id} with a chance of {chance}", lie
        if a.cost.seconds is not None:
            for wrong in (-1.0, float("nan"), float("inf")):
                lie = partial(with_action, plan, a.id, cost=replace(a.cost, seconds=wrong))
                yield f"{a.id} takes {wrong}", lie


def bounds(plan: Plan) -> Iterator[Lie]:
    """A bound too low or too high, another lane, another reason, slack that is not there.

    Less slack than there is may be told of a large plan, so that is no lie.
    """
    timing = plan.timing
    if timing is None:
        return
    period = timing.period
    for word in ("resource_bound", "recurrence_bound"):
        value = getattr(timing, word)
        for wrong in others(value, 0.0, value / 2, (value + period) / 2, period):
            yield f"{word} {wrong}", partial(with_timing, plan, **{word: wrong})
    for binding in others(timing.binding, "resource", "recurrence", "order"):
        yield f"{binding} binds", partial(with_timing, plan, binding=binding)
    for lane in ("device 99", "nothing"):
        yield f"{lane} is busiest", partial(with_timing, plan, busiest=lane)
    for times in (0.5, 3):
        lie = partial(with_timing, plan, latency=times * timing.latency)
        yield f"{times} of the latency", lie
    for place, (name, room) in enumerate(timing.slack):
        before, after = timing.slack[:place], timing.slack[place + 1 :]
        if room < float("inf"):
            more = (*before, (name, room + period / 4), *after)
            yield f"more slack of {name}", partial(with_timing, plan, slack=more)
        yield f"no slack of {name}", partial(with_timing, plan, slack=(*before, *after))


def with_timing(plan: Plan, **changes: object) -> Plan:
    """The plan with a timing that says otherwise."""
    assert plan.timing is not None
    return replace(plan, timing=replace(plan.timing, **changes))


def roles(plan: Plan) -> Iterator[Lie]:
    """What serves or closes otherwise than its node does; what takes what is not its own."""
    for a in plan.actions:
        lie = partial(with_action, plan, a.id, closing=not a.closing)
        yield f"{a.id} closing: {not a.closing}", lie
        if a.kind != "run":
            yield from foreign(plan, a)
    for i in plan.instances:
        ways = (("rollout",), ("forward",), ("train",), ("train", "forward", "rollout"), ())
        for uses in ways:
            if set(uses) != set(i.uses):
                yield f"{i.name} serves {uses}", partial(with_instance, plan, i.name, uses=uses)
        idle = partial(with_instance, plan, i.name, micro_tokens=0)
        yield f"{i.name} passes no tokens", idle
    yield "staler", partial(replace, plan, staleness=plan.staleness + 1)


def with_instance(plan: Plan, name: str, **changes: object) -> Plan:
    """The plan with one instance changed."""
    every = tuple(replace(i, **changes) if i.name == name else i for i in plan.instances)
    return replace(plan, instances=every)


def foreign(plan: Plan, a: Action) -> Iterator[Lie]:
    """What is no run needs, reads or writes what it does not, or is of another instance."""
    for part in plan.parts:
        if part.name not in a.needs and set(part.devices) <= set(a.devices):
            more = with_action(plan, a.id, needs=(*a.needs, part.name))
            yield f"{a.id} needs {part.name}", partial(restated, more)
    for i in plan.instances:
        if a.part is not None and a.instance != i.name:
            yield f"{a.id} of {i.name}", partial(with_action, plan, a.id, instance=i.name)
        if a.kind != "reshard" and not i.trained:
            reads, writes = (*a.reads, (i.name, 0)), (*a.writes, (i.name, 0))
            yield f"{a.id} reads {i.name}", partial(with_action, plan, a.id, reads=reads)
            yield f"{a.id} writes {i.name}", partial(with_action, plan, a.id, writes=writes)


KINDS: dict[str, Callable[[Plan], Iterator[Lie]]] = {
    "sizes": sizes,
    "left behind": left_behind,
    "moved": moved,
    "working": working,
    "seconds": seconds,
    "bounds": bounds,
    "roles": roles,
}
