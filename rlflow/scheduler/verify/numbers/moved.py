"""Rules of the verifier: who moves weights moves as many bytes as there are of what it moves.

Knows the graph and the plan; shares no code with the passes or the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil, floor

from rlflow.scheduler.plan.plan import LENT, Instance, Part
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.lanes import given_back
from rlflow.scheduler.verify.memory import leaving
from rlflow.scheduler.verify.numbers.parameters import (
    NUMBER,
    UNEVEN,
    ParameterCounts,
    Span,
    counts_of,
    holds_bytes,
    trained_tower,
    which_weights,
)
from rlflow.scheduler.verify.weights import cells_held, layers_of, stage_held

Box = tuple[range, range]
UNKNOWN = 2**63
TOWER = 7
NOTHING = (range(0), range(0), range(0), range(0))


def sleeps_copy_their_parts(facts: Facts) -> Iterator[str]:
    """An offload copies what its part gives back on each device, a discard nothing.

    What drafts in an engine is none of what an update brings: a wake of discarded weights copies
    it from the host.
    """
    for a in facts.plan.actions:
        if a.part is None:
            continue
        part = facts.parts[a.part]
        least = most = given_back(part) * len(leaving(part)) if a.mode == "offload" else 0
        if (a.kind, a.mode, part.kind) == ("wake", "discard", "weights"):
            least, most = _drafting(facts, part)
        if a.cost.moved is None or not least <= a.cost.moved <= most:
            yield f"{a.id} moves {a.cost.moved} bytes, {a.mode} of {a.part} is {least}"


def _drafting(facts: Facts, part: Part) -> Span:
    """Bytes of what drafts in an engine, on all devices of its weights that sleep."""
    i, counts = facts.instances[part.instance], counts_of(facts)
    if i.options is None or getattr(i.options, "speculative", None) is not None:
        return 0, part.on_host * len(leaving(part))
    spans = [counts.on_rank(o, i.tp) for o in facts.plan.instances if o.inside == i.name]
    if None in spans:
        return 0, (part.size or 0) * len(leaving(part))
    known = [span for span in spans if span is not None]
    least, most = (sum(span[end] for span in known) * len(leaving(part)) for end in (0, 1))
    return least, most


def reshards_bring_what_lacks(facts: Facts) -> Iterator[str]:
    """A reshard moves what its targets' devices lack of what training changes, and no more.

    Where the processes hold all of it already, it is copied within them: every piece of theirs.
    So it is where engines open buckets in place.
    """
    counts = counts_of(facts)
    for a in facts.plan.actions:
        if a.kind != "reshard":
            continue
        source = facts.instances[str(a.instance)]
        weights = facts.parts.get(source.weights)
        if weights is None or (a.cost.moved is None) is not (weights.size is None):
            yield f"{a.id} moves {a.cost.moved} bytes of {source.weights}, of another size"
        if a.cost.moved is None:
            continue
        targets = [facts.instances[name] for name in a.targets]
        lent = a.transport in LENT
        in_place = lent or a.transport == "copy"
        least, most = _lacking(counts, source, targets, in_place=in_place, lent=lent)
        if not least <= a.cost.moved <= most:
            yield f"{a.id} moves {a.cost.moved} bytes, its targets lack {least} to {most}"


def _lacking(
    counts: ParameterCounts,
    source: Instance,
    targets: Sequence[Instance],
    *,
    in_place: bool,
    lent: bool,
) -> Span:
    """The fewest and the most bytes that targets lack of a source, however `tp` cuts a model.

    Of a model trained as a whole a parameter is cut along its outputs or its inputs, a few norms
    along neither, and nobody says how many are which. Adapters are cut by neither. Engines to which
    memory is lent are brought frozen parts as well.
    """
    model = counts.model(source)
    whole = counts.wholes.get(which_weights(model)) if lent else counts.changed_of(source)
    if whole is None or whole[0] > whole[1]:
        return 0, UNKNOWN
    frozen = () if lent else model.freeze
    seeing = trained_tower(source, frozen) if model.lora is None else 0
    whole = whole[0] - seeing, whole[1] - seeing
    least = most = Fraction(0)
    number = NUMBER[model.dtype]
    for target in targets:
        times = _times(source, target, in_place=in_place)
        *layers, tower = times
        uncut, *cut = layers
        fewest = uncut if model.lora else min(cut)
        largest = uncut if model.lora else max(cut)
        low = fewest / number if holds_bytes(target) else fewest
        least, most = least + tower * seeing, most + tower * seeing
        least += (low + UNEVEN * min(uncut - low, Fraction(0))) * whole[0]
        most += (largest + UNEVEN * max(uncut - largest, Fraction(0))) * whole[1]
    return max(floor(least - len(targets)), 0) * number, ceil(most) * number


def _times(source: Instance, target: Instance, *, in_place: bool) -> tuple[Fraction, ...]:
    """How often a parameter is to come, all devices together: uncut, by outputs, inputs, experts.

    Then an embedding, a head and what is both, which lie at one end of the layers, or at each, and
    last a tower, uncut and where the embedding is. A device needs its piece, without what it has of
    the source's.
    """
    cells, layers = source.ranks * target.ranks, layers_of(source, target)
    # Cells of all layers together, or of an end: Fractions of every device would take long.
    found = [0] * 8
    for device in target.devices:
        need = cells_held(target, device, cells)
        here = device in source.devices and not in_place
        has = cells_held(source, device, cells) if here else NOTHING
        deep = _depths(stage_held(target, device, layers), layers)
        known = _depths(stage_held(source, device, layers) if here else frozenset(), layers)
        boxes = (_boxes(need, cells), _boxes(has, cells))
        # Embedding and head are cut by their outputs.
        for number, kind in enumerate((2, 0, 1, 3, 0, 0, 0, 2)):
            sides, held = (each[kind] for each in boxes)
            common = [_common(mine, theirs) for mine, theirs in zip(sides, held, strict=True)]
            end = 1 if number == TOWER else max(number - 3, 0)
            mine, theirs = deep[end], known[end]
            own = len(sides[0]) * len(sides[1]) * len(mine)
            found[number] += own - common[0] * common[1] * len(mine & theirs)
    whole = cells * cells
    return tuple(
        Fraction(each, whole * (layers if number < 4 else 1)) for number, each in enumerate(found)
    )


def _depths(held: frozenset[int], layers: int) -> tuple[set[int], ...]:
    """Which layers are held, then whether an embedding, a head, and what is both."""
    ends = {place for place in (-1, layers) if place in held}
    both = {0} if ends else set[int]()
    return set(held) - {-1, layers}, ends - {layers}, ends - {-1}, both


def _boxes(sides: tuple[range, ...], cells: int) -> tuple[Box, Box, Box, Box]:
    """What a device holds of a parameter cut by outputs, by inputs, by neither, and of experts."""
    outputs, lines, inputs, experts = sides
    whole = range(cells if outputs or lines else 0)
    return (outputs, whole), (lines, inputs), (lines, whole), (experts, whole)


def _common(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
