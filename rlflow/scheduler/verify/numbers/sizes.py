"""Rules of the verifier: the sizes of a plan's parts agree with each other.

What a model's weights take is for no rule to know; that all parts of it are of one model is. Knows
the graph and the plan; shares no code with the passes or the costs.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.scheduler.plan.plan import Instance, Part
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.numbers.parameters import (
    NUMBER,
    ParameterCounts,
    Span,
    counts_of,
    holds_bytes,
    lent,
    share_of,
)

# Activations lie on the host in pieces of this size.
PIECE = 32 << 20


def sizes_agree(facts: Facts) -> Iterator[str]:
    """Parts of one model are of one number of parameters, each in the bytes of its numbers.

    Gradients and moments are of all that is trained: of the weights, some of them, or adapters.
    """
    counts = counts_of(facts)
    yield from _are_known_together(facts)
    for i in facts.plan.instances:
        if i.options is not None and {i.pool_part, i.weights} <= facts.parts.keys():
            yield from _pool_has_tokens(facts, counts, i)
    for part, i in counts.known.values():
        uncounted = _has_files(i) or holds_bytes(i)
        if lent(part) % NUMBER[counts.model(i).dtype] and not uncounted:
            yield f"{part.name} is of {lent(part)} bytes, no whole number of parameters"
        if i.trained and {i.gradients, i.optimizer} <= facts.parts.keys():
            yield from _is_trained(facts, counts, i, lent(part))
        if i.offload == "layers":
            yield from _comes_and_goes(counts, i, part)
        if i.options is not None:
            yield from _lies_in_engine(facts, counts, i, lent(part))
    yield from counts.contradictions()


def _visits(i: Instance, part: Part) -> bool:
    """Whether a part stays on the host, and on no device: an optimizer's state, or activations."""
    return part.kind == "activations" or (part.kind == "optimizer" and i.offload == "optimizer")


def _has_files(i: Instance) -> bool:
    """Whether an engine holds a draft model by its files, of whatever many bytes."""
    return getattr(i.options, "speculative", None) is not None


def _are_known_together(facts: Facts) -> Iterator[str]:
    """Sizes of a model are known or not, all of them; what is known is more than nothing."""
    graph = facts.plan.graph
    known: dict[tuple[object, ...], set[bool]] = {}
    for part in facts.plan.parts:
        i = facts.instances[part.instance]
        model = graph.model(i.model)
        share = i.options is not None and getattr(i.options, "mem_fraction_static", None)
        may_be_none = i.inside is not None or (part.kind == "pool" and share is not None)
        may_be_none |= _visits(i, part)
        if part.size is not None and part.size < int(not may_be_none):
            yield f"{part.name} takes {part.size} bytes"
        if part.kind == "activations" and (part.size or part.on_host % PIECE):
            yield f"{part.name} takes {part.size} bytes, and {part.on_host} on the host"
        if any(size < 0 for _, size in part.holds):
            yield f"{part.name} holds {dict(part.holds)}"
        if part.kind == "cache" and part.size is None and i.name in counts_of(facts).known:
            yield f"{part.name} is of no known size, and {i.weights} is"
        if part.kind not in ("pool", "cache") and i.drafter is None:
            alike = known.setdefault((model.path, model.lora), set())
            alike.add(part.size is None)
            if len(alike) > 1:
                yield f"{part.name} is of a model of which some sizes are known and some not"


def _is_trained(facts: Facts, counts: ParameterCounts, i: Instance, held: int) -> Iterator[str]:
    """Gradients and moments are of as many parameters as each other, and as there are."""
    model = counts.model(i)
    gradients, moments = facts.parts[i.gradients], facts.parts[i.optimizer]
    number = counts.trained(i)
    each, beside = number.gradient, number.moments
    trained, rest = divmod(gradients.size or 0, each)
    stays = _visits(i, moments)
    kept, none = (moments.on_host, moments.size) if stays else (moments.size, moments.on_host)
    if rest or not number.are_moments(kept, trained) or none:
        yield (
            f"{moments.name} is of {kept} bytes and {gradients.name} of {gradients.size}: "
            f"of one parameter they are {beside} and {each}"
        )
    lower = number.weight < NUMBER["float32"]  # Those have float32 copies among the moments.
    most = (kept or 0) + (0 if lower else number.weight) * trained
    for saved in facts.plan.saved:
        if saved.instance == i.name and saved.size * _replicas(i) - most not in range(_replicas(i)):
            yield f"a save of {i.name} copies {saved.size} bytes of {trained} parameters"
    own = trained * number.weight
    if own >= held if model.trained_in_part else own != held:
        yield f"{gradients.name} is of {trained} parameters, {i.weights} has {held} bytes"


def _replicas(i: Instance) -> int:
    """How often all of an instance is there; each writes a part of it."""
    return len(i.devices) // i.ranks


def _comes_and_goes(counts: ParameterCounts, i: Instance, part: Part) -> Iterator[str]:
    """Of layers that come and go there are never more than all."""
    most = counts.on_rank(i, 1)
    if most is not None and (part.size or 0) > most[1]:
        yield f"{part.name} has some layers at a time in {part.size} bytes, all take {most[1]}"


def _lies_in_engine(facts: Facts, counts: ParameterCounts, i: Instance, held: int) -> Iterator[str]:
    """An engine's weights are its model's, and its drafter's where it has one."""
    spans = [counts.on_rank(i, i.tp)]
    for other in facts.plan.instances:
        if other.inside == i.name:
            spans.append(counts.on_rank(other, i.tp))
    known = [span for span in spans if span is not None]
    least = sum(span[0] for span in known)
    if held < least or (len(known) == len(spans) and _exceeds(i, held, known)):
        yield f"{i.weights} holds {held} bytes of weights, its models take {least} on a rank"


def _pool_has_tokens(facts: Facts, counts: ParameterCounts, i: Instance) -> Iterator[str]:
    """A pool is of as many numbers for each token as for another, and known where weights are.

    So many on all ranks of a replica together. What a share of the memory leaves is any number.
    """
    pool, weights = facts.parts[i.pool_part], facts.parts[i.weights]
    beside = [facts.parts[o.weights] for o in facts.plan.instances if o.inside == i.name]
    all_known = bool(beside) and all(part.size is not None for part in beside)
    if weights.size is None and all_known and counts.on_rank(i, i.tp) is not None:
        yield f"{weights.name} is of no known size, and all that it holds is"
    if pool.size is None:
        if weights.size is not None:
            yield f"{pool.name} is of no known size, and {weights.name} is of {weights.size} bytes"
        return
    tokens = getattr(i.options, "max_total_tokens", None)
    if tokens and getattr(i.options, "mem_fraction_static", None) is None:
        each, held = -(-lent(pool) * i.tp // tokens), lent(pool)
        if each < 1 or tokens * each // i.tp != held:
            yield f"{pool.name} has {held} bytes for {tokens} tokens, no whole number for each"


def _exceeds(i: Instance, held: int, known: list[Span]) -> bool:
    return not _has_files(i) and held > sum(span[1] for span in known)


def leftovers_are_right(facts: Facts) -> Iterator[str]:
    """What sleeps leaves what its process keeps; hosts hold copies of what engines are sent.

    A part of this process leaves nothing, and has nothing on the host while it is awake.
    """
    moving = {a.part for a in facts.plan.actions if a.part is not None}
    for part in facts.plan.parts:
        i, size = facts.instances[part.instance], part.size or 0
        kept = size - lent(part) if part.kind == "weights" else 0
        added = part.kind == "gradients" and i.name in facts.added_to
        stays = part.kind == "cache" or added or (i.options is not None and part.name not in moving)
        known = part.size is not None
        if known and part.residual not in ({kept, size} if stays else {kept}):
            yield f"{part.name} leaves {part.residual} bytes asleep, its process keeps {kept}"
        sent = part.kind == "weights" and (i.options is not None or i.inside is not None)
        if not sent and not _visits(i, part) and (part.on_host or part.more_on_host):
            yield f"{part.name} has {part.on_host} bytes on its host, and nothing is sent there"
        if sent:
            yield from _is_staged(facts, i, part)


def _is_staged(facts: Facts, i: Instance, part: Part) -> Iterator[str]:
    """Each host of a replica has one copy of the weights that come, shared out to its devices.

    An engine's own copy of what drafts in it lies beside that on accelerators, and on a CPU so
    much of its process as was measured.
    """
    counts = counts_of(facts)
    counted = ((group, len({facts.plan.host_of(o) for o in group})) for group in i.row_groups)
    hosts = {d: count for group, count in counted for d in group}
    fewest, span = min(hosts.values()), counts.on_rank(i, 1)
    if span is None:
        return
    least, most = (n * fewest for n in share_of(span, i.tp))
    own = counts.facts.instances.get(i.inside or "")
    saves = own is not None and bool(getattr(own.options, "memory_saver", False))
    on_cpu, files = "cpu" in facts.plan.cluster.split(" ")[0], _has_files(i)
    least, most = (least * 2, most * 2) if saves and not on_cpu else (least, most)
    if part.on_host < least or (part.on_host > most and not (on_cpu or files)):
        yield f"{part.name} has {part.on_host} bytes on its host, a copy is {least} a device"
    more = dict(part.more_on_host)
    for device, count in hosts.items():
        few, many = (n * (count - fewest) for n in share_of(span, i.tp))
        if not few <= more.get(device, 0) <= many:
            yield f"{part.name} has {more.get(device, 0)} bytes more on the host of {device}"
