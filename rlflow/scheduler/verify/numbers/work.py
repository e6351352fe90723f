"""Rules of the verifier: what actions cost, and how often they run, is said without contradiction.

Knows the graph and the plan; shares no code with the passes or the costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite

from rlflow.graph.roles import Averaged
from rlflow.scheduler.plan.plan import Action, Instance, Trip
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.numbers.parameters import NUMBER, holds_bytes

NEAR = 1e-9
# A reshard that leaves its processes brings at the most so many buckets at a time.
BUCKETS = 2


def costs_are_formed(facts: Facts) -> Iterator[str]:
    """Seconds and bytes are numbers, memory is what it is held for, and who moves nothing says so.

    Seconds are known where sizes are, and a model that computes in its worker works in some memory.
    """
    for a in facts.plan.actions:
        cost = a.cost
        if cost.seconds is not None and not (isfinite(cost.seconds) and cost.seconds >= 0):
            yield f"{a.id} takes {cost.seconds} s"
        numbers = (cost.moved or 0, cost.transient or 0, *(size for _, size in cost.holds))
        if min(numbers) < 0 or sum(size for _, size in cost.holds) != (cost.transient or 0):
            yield f"{a.id} takes {cost.transient} bytes, and holds {dict(cost.holds)}"
        if a.kind == "run":
            yield from _run_is_formed(facts, a)
        elif (cost.moved is None) is not (cost.seconds is None):
            yield f"{a.id} moves {cost.moved} bytes in {cost.seconds} s"
        if a.part is not None and cost.transient:
            yield f"{a.id} takes {cost.transient} bytes beside the part that it moves"
        if a.kind == "reshard" and cost.moved is not None:
            # What is quantised is gathered before, in as many bytes as a number has.
            low = [facts.instances[t] for t in a.targets if holds_bytes(facts.instances[t])]
            size = max((NUMBER[facts.plan.graph.model(i.model).dtype] for i in low), default=0)
            most = (BUCKETS + size) * cost.moved if a.transport != "copy" else 0
            if not min(most, 1) <= (cost.transient or 0) <= most:
                yield f"{a.id} takes {cost.transient} bytes to bring {cost.moved} by {a.transport}"


def _run_is_formed(facts: Facts, a: Action) -> Iterator[str]:
    """A run moves nothing; what is known of it is what is known of its model."""
    cost, i = a.cost, facts.instances.get(a.instance or "")
    if cost.moved != 0:
        yield f"{a.id} moves {cost.moved} bytes, and is a run"
    if i is None:
        if cost.transient or cost.seconds is None:
            yield f"{a.id} has no model, and takes {cost.transient} bytes for {cost.seconds} s"
        return
    if (cost.seconds is None) is not (cost.transient is None):
        yield f"{a.id} takes {cost.transient} bytes for {cost.seconds} s"
    if i.weights not in facts.parts:
        return
    sized, lora = facts.parts[i.weights].size is not None, facts.plan.graph.model(i.model).lora
    unsized = not sized and lora is None and i.drafter is None
    if sized if cost.seconds is None else unsized:
        yield f"{a.id} takes {cost.seconds} s, {i.weights} is of {'a' if sized else 'no'} size"
    least, most = _worked_in(facts, a, i)
    if cost.transient is not None and not least <= cost.transient <= most:
        yield f"{a.id} computes with {i.name} in {cost.transient} bytes"


def _worked_in(facts: Facts, a: Action, i: Instance) -> tuple[int, float]:
    """The least and the most bytes that a run may take of a device.

    On an accelerator an engine's process keeps what it computes in, which is counted with its pool.
    An average takes none where both models have numbers of one kind.
    """
    graph = facts.plan.graph
    averaged = graph.node(str(a.node)).role(Averaged)
    if averaged is not None:
        alike = graph.model(averaged.source).dtype == graph.model(i.model).dtype
        return 0, 0 if alike else inf
    kinds = {kind.split(":")[0] for kind in facts.plan.cluster.split(" ")[0].split(",")}
    if i.options is None or kinds == {"cpu"}:
        return 1, inf
    return 0, inf if "cpu" in kinds else 0


def pieces_cost_alike(facts: Facts) -> Iterator[str]:
    """Pieces of equally many whole prompts take the same time and memory, each of them."""
    first: dict[tuple[object, ...], Action] = {}
    for a in facts.plan.actions:
        if a.chunk is None or a.chunk.by != "prompts":
            continue
        other = first.setdefault((a.kind, a.node, a.makes, a.chunk.count), a)
        if a.cost != other.cost:
            yield f"{a.id} costs otherwise than {other.id}, and does as much"


def chances_are_those_of_trips(facts: Facts) -> Iterator[str]:
    """A trip runs with one chance, the first as often as its loop, a later one never more often.

    Of n trips that are expected the first n run, and the next with what is left of it.
    """
    found: dict[tuple[tuple[str, int], ...], float] = {(): 1.0}
    for a in facts.plan.actions:
        chance = found.setdefault(_trips(a.trip), a.chance)
        if a.chance != chance or not 0 <= a.chance <= 1:
            yield f"{a.id} runs with a chance of {a.chance:g}, its trip with {chance:g}"
    for trips, chance in found.items():
        if not trips:
            continue
        *around, (loop, index) = trips
        outer = found.get(tuple(around), chance)
        before = outer if index == 0 else found.get((*around, (loop, index - 1)), chance)
        if chance > before + NEAR or (index == 0 and abs(chance - outer) > NEAR):
            yield f"trip {index + 1} of {loop} has a chance of {chance:g}, before it {before:g}"
        if index and chance > NEAR and before < outer - NEAR:
            yield f"trip {index + 1} of {loop} may follow one that is not expected to the full"


def _trips(trip: Trip | None) -> tuple[tuple[str, int], ...]:
    return () if trip is None else tuple((level.loop, level.index) for level in trip.levels)
