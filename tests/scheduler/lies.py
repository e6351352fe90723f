"""Plans that lie in one number, or one word, and agree with themselves in all that follows from it.

Peaks are those of the sizes that are told, and what moves with a part is what it says it is: no
two figures that the plan's own sums connect contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlflow.scheduler.plan.plan import Action, Cost, Part, Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.lanes import given_back
from rlflow.scheduler.verify.memory import leaving, memory_of
from tests.scheduler.mutants import Mutant, with_action

FACTORS = (0.5, 2)


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


def lies(plan: Plan) -> Iterator[Mutant]:
    """Every lie of every kind."""
    for kind in KINDS.values():
        yield from kind(plan)


def sizes(plan: Plan) -> Iterator[Mutant]:
    """A part of half its size or twice that, of none, or of nobody knows how much."""
    for part in plan.parts:
        if not part.size:
            continue
        for times in FACTORS:
            size = int(part.size * times)
            yield f"{part.name} x {times}", with_part(plan, part.name, **scaled(part, size))
        nothing = scaled(part, 0)
        yield f"{part.name} of nothing", with_part(plan, part.name, **nothing)
        unknown = {**nothing, "size": None, "residual": 0, "holds": ()}
        yield f"{part.name} unknown", with_part(plan, part.name, **unknown)


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


def left_behind(plan: Plan) -> Iterator[Mutant]:
    """A part that leaves another share of itself on its devices, or on its host."""
    for part in plan.parts:
        size, moved = part.size or 0, any(a.part == part.name for a in plan.actions)
        for residual in {0, size // 2, size} - {part.residual} if moved else ():
            lie = with_part(plan, part.name, residual=residual)
            yield f"{part.name} leaves {residual}", lie
        for on_host in {0, part.on_host // 2, 2 * part.on_host, size} - {part.on_host}:
            lie = with_part(plan, part.name, on_host=on_host)
            yield f"{part.name} has {on_host} on its host", lie
        if part.more_on_host or part.on_host:
            more = () if part.more_on_host else ((part.devices[0], part.on_host),)
            yield f"{part.name} has {more} more", with_part(plan, part.name, more_on_host=more)
        if part.holds:
            (first, held), (second, beside), *rest = part.holds
            shifted = (first, held - beside // 2), (second, beside + beside // 2), *rest
            yield f"{part.name} holds {shifted}", with_part(plan, part.name, holds=shifted)
    for kept in plan.kept:
        for size in (kept.size // 2, kept.size * 2):
            others = tuple(replace(k, size=size) if k == kept else k for k in plan.kept)
            yield f"{kept.node} keeps {size}", restated(replace(plan, kept=others))


def moved(plan: Plan) -> Iterator[Mutant]:
    """Bytes that an action moves: half of them, twice as many, none, or some where none do."""
    for a in plan.actions:
        known = a.cost.moved
        for size in {0, (known or 0) // 2, 2 * (known or 0), 1 << 20, None} - {known}:
            lie = with_action(plan, a.id, cost=replace(a.cost, moved=size))
            yield f"{a.id} moves {size}", lie


def working(plan: Plan) -> Iterator[Mutant]:
    """Memory that an action takes while it runs: none, more, or of other things than it holds."""
    for a in plan.actions:
        known = a.cost.transient or 0
        if known:
            yield f"{a.id} works in nothing", with_cost(plan, a, transient=0, holds=())
            yield f"{a.id} holds nothing of it", with_cost(plan, a, holds=())
            yield f"{a.id} works in half", with_cost(plan, a, transient=known // 2)
        else:
            lie = with_cost(plan, a, transient=1, holds=(("scratch", 1),))
            yield f"{a.id} works in a byte", lie
        if a.chunk is not None and a.cost.holds:
            yield f"{a.id} works in twice as much", with_cost(plan, a, **doubled(a.cost))


def doubled(cost: Cost) -> dict[str, object]:
    """A cost with twice the memory, all of it."""
    holds = tuple((what, 2 * size) for what, size in cost.holds)
    return {"holds": holds, "transient": 2 * (cost.transient or 0)}


def seconds(plan: Plan) -> Iterator[Mutant]:
    """Chances that loops do not give, and seconds that no clock shows."""
    for a in plan.actions:
        for chance in {0.0, 0.25, 1.0, 1.5} - {a.chance}:
            yield f"{a.id} with a chance of {chance}", with_action(plan, a.id, chance=chance)
        if a.cost.seconds is not None:
            for wrong in (-1.0, float("nan"), float("inf")):
                lie = with_cost(plan, a, seconds=wrong)
                yield f"{a.id} takes {wrong}", replace(lie, timing=plan.timing)


def bounds(plan: Plan) -> Iterator[Mutant]:
    """A bound too low or too high, another lane, another reason, slack that is not there."""
    timing = plan.timing
    if timing is None:
        return
    for word in ("resource_bound", "recurrence_bound"):
        value = getattr(timing, word)
        for wrong in {0.0, value / 2, (value + timing.period) / 2, timing.period} - {value}:
            lie = replace(timing, **{word: wrong})
            yield f"{word} {wrong}", replace(plan, timing=lie)
    for binding in {"resource", "recurrence", "order"} - {timing.binding}:
        yield f"{binding} binds", replace(plan, timing=replace(timing, binding=binding))
    yield "elsewhere is busiest", replace(plan, timing=replace(timing, busiest="device 99"))
    yield "nothing is busiest", replace(plan, timing=replace(timing, busiest="nothing"))
    for times in (0.5, 3):
        lie = replace(timing, latency=times * timing.latency)
        yield f"{times} of the latency", replace(plan, timing=lie)
    for place, (name, room) in enumerate(timing.slack):
        for wrong in (room + timing.period / 4, room / 2):
            if wrong != room and wrong < float("inf"):
                slack = (*timing.slack[:place], (name, wrong), *timing.slack[place + 1 :])
                lie = replace(plan, timing=replace(timing, slack=slack))
                yield f"{name} has {wrong} of slack", lie
        slack = (*timing.slack[:place], *timing.slack[place + 1 :])
        yield f"no slack of {name}", replace(plan, timing=replace(timing, slack=slack))


def roles(plan: Plan) -> Iterator[Mutant]:
    """What serves or closes otherwise than its node does; what takes what is not its own."""
    for a in plan.actions:
        yield f"{a.id} closing: {not a.closing}", with_action(plan, a.id, closing=not a.closing)
        if a.kind == "run":
            continue
        for part in plan.parts:
            if part.name not in a.needs and set(part.devices) <= set(a.devices):
                lie = with_action(plan, a.id, needs=(*a.needs, part.name))
                yield f"{a.id} needs {part.name}", restated(lie)
        for i in plan.instances:
            if a.part is not None and a.instance != i.name:
                yield f"{a.id} of {i.name}", with_action(plan, a.id, instance=i.name)
            if a.kind != "reshard" and not i.trained:
                reads, writes = (*a.reads, (i.name, 0)), (*a.writes, (i.name, 0))
                yield f"{a.id} reads {i.name}", with_action(plan, a.id, reads=reads)
                yield f"{a.id} writes {i.name}", with_action(plan, a.id, writes=writes)
    for i in plan.instances:
        for uses in (("rollout",), ("forward",), ("train",), ("train", "forward", "rollout"), ()):
            if set(uses) != set(i.uses):
                others = tuple(replace(o, uses=uses) if o == i else o for o in plan.instances)
                yield f"{i.name} serves {uses}", replace(plan, instances=others)
        others = tuple(replace(o, micro_tokens=0) if o == i else o for o in plan.instances)
        yield f"{i.name} passes no tokens", replace(plan, instances=others)
    yield "staler", replace(plan, staleness=plan.staleness + 1)


KINDS: dict[str, Callable[[Plan], Iterator[Mutant]]] = {
    "sizes": sizes,
    "left behind": left_behind,
    "moved": moved,
    "working": working,
    "seconds": seconds,
    "bounds": bounds,
    "roles": roles,
}
