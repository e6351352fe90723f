"""Stages of a pipeline: which models can be cut into them.

Read by plans and by engines. Knows families and numbers of layers; neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rlflow.errors import Finding
from rlflow.modelfiles.families import Family


def staging_finding(
    path: str, family: Family, layers: int, pp: int, virtual: int = 1
) -> Finding | None:
    """E531 where a model cannot be cut into `pp` x `virtual` stages of whole layers; None else."""
    if pp == 1 and virtual == 1:
        return None
    if pp == 1:
        return Finding(
            code="E531",
            what=f"virtual={virtual}: ranks of model {path!r} cannot have several stages each",
            got=f"pp={pp}",
            expected="pp=2 at least",
            fix=f"rf.on(..., pp={pp}, virtual=1)",
        )
    if not family.staged:
        return Finding(
            code="E531",
            what=f"pp={pp}: the layers of model {path!r} cannot be cut into stages",
            got="a family whose stages were never compared with the whole model",
            fix="rf.on(..., pp=1)",
        )
    most, first = most_stages(family, layers), max(1, family.deep)
    if pp * virtual <= most:
        return None
    each = f" virtual={virtual}" if virtual > 1 else ""
    deep = f", and {first} in the first, to which a tower adds" if first > 1 else ""
    return Finding(
        code="E531",
        what=f"pp={pp}{each}: model {path!r} has fewer layers than its stages ask for",
        got=f"{layers} layers",
        expected=f"one layer in each stage at least{deep}",
        fix=f"rf.on(..., pp={min(pp, most)})",
    )


def most_stages(family: Family, layers: int) -> int:
    """How many stages so many layers have at the most; the first has all to which a tower adds."""
    return max(1, layers - max(1, family.deep) + 1)


def splitting_finding(
    path: str, family: Family | None, pp: int, virtual: int, *, once: bool
) -> Finding | None:
    """E531 where backwards of a trained model cannot be in two halves; None else.

    Its gradients are summed `once` in a step over ranks that share weights. A `family` may not be
    known.
    """
    fix = 'rf.on(..., pp=2, schedule="zero-bubble")'
    if pp == 1:
        got, expected = "pp=1", "pp=2 at least"
    elif virtual > 1:
        got, expected = f"virtual={virtual}", "one stage on each rank"
    elif family is not None and family.experts != "none" and not family.dispatched:
        got = "a family of mixtures whose experts compute otherwise, or were never compared"
        expected = "a dense model, or a mixture that takes ep="
        fix = f"rf.on(..., pp={pp})"
    elif not once:
        got, expected = 'gradient_sync="each"', "gradients of weights that are summed once"
        fix = fix.replace(")", ', gradient_sync="last")')
    else:
        return None
    return Finding(
        code="E531",
        what=f'schedule="zero-bubble": backwards of model {path!r} cannot be in two halves',
        got=got,
        expected=expected,
        fix=fix,
    )


def ahead(place: int, pp: int, virtual: int = 1) -> int:
    """Forwards through one stage that a rank makes before its first backward.

    One forward, one backward (Narayanan et al., arXiv:2006.09503): as many as there are ranks after
    it. With several `virtual` stages on each, which micro-batches go through `pp` at a time
    (Narayanan et al., arXiv:2104.04473, section 2.2), twice that, and a round of all but the last.
    """
    return (pp - place - 1) * (1 if virtual == 1 else 2) + (virtual - 1) * pp


def under_way(place: int, pp: int, virtual: int = 1) -> float:
    """Micro-batches whose activations a rank has at the most, in those of all of its stages."""
    return (ahead(place, pp, virtual) + 1) / virtual


def weights_behind(place: int) -> int:
    """Backwards that a rank makes before it begins with gradients of weights, where they are split.

    As many as there are ranks before it, so that each keeps something of as many micro-batches as
    there are ranks, which is what the first one has under way in any case (ZB-H1 of Qi et al.,
    arXiv:2401.10241, section 2.1).
    """
    return place


@cache
def stage_layers(
    layers: int, pp: int, *, layer: float = 1, first: float = 0, last: float = 0, least: int = 1
) -> tuple[int, ...]:
    """How many of a model's layers each of `pp` stages has, at least one, and the first `least`.

    A layer weighs `layer`; the first stage has `first` beside its layers, the last `last`. The
    heaviest stage is as light as it can be. Of the cuts of which that holds, later stages have what
    they can: those before them have more passes under way.
    """
    fewest = [least] + [1] * (pp - 1)
    beside = [0.0] * pp
    beside[0] += first
    beside[-1] += last
    heaviest = min(
        weight
        for stage in {0, 1 % pp, pp - 1}
        for count in range(1, layers + 1)
        if sum(_fitting(weight := beside[stage] + count * layer, beside, layer, fewest)) >= layers
    )
    left, found = layers, list[int]()
    for before, most in reversed(list(enumerate(_fitting(heaviest, beside, layer, fewest)))):
        found.insert(0, left if before == 0 else min(most, left - sum(fewest[:before])))
        left -= found[0]
    return tuple(found)


def _fitting(
    weight: float, beside: Sequence[float], layer: float, fewest: Sequence[int]
) -> list[int]:
    """How many layers each stage has at the most where it weighs no more, `fewest` at the least."""
    return [
        max(few, int((weight - each) / layer + 1e-9))
        for each, few in zip(beside, fewest, strict=True)
    ]
