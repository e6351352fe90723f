"""Stages of a pipeline: which models can be cut into them.

Read by plans and by engines. Knows families and numbers of layers; neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rlflow.errors import Finding
from rlflow.modelfiles.families import Family


def staging_finding(path: str, family: Family, layers: int, pp: int) -> Finding | None:
    """E531 where a model cannot be cut into `pp` stages of whole layers; None where it can."""
    if pp == 1:
        return None
    if not family.staged:
        return Finding(
            code="E531",
            what=f"pp={pp}: the layers of model {path!r} cannot be cut into stages",
            got="a family whose stages were never compared with the whole model",
            fix="rf.on(..., pp=1)",
        )
    if pp <= layers:
        return None
    return Finding(
        code="E531",
        what=f"pp={pp}: model {path!r} has fewer layers than stages",
        got=f"{layers} layers",
        expected="one layer in each stage at least",
        fix=f"rf.on(..., pp={layers})",
    )


@cache
def stage_layers(
    layers: int, pp: int, *, layer: float = 1, first: float = 0, last: float = 0
) -> tuple[int, ...]:
    """How many of a model's layers each of `pp` stages has, at least one.

    A layer weighs `layer`; the first stage has `first` beside its layers, the last `last`. The
    heaviest stage is as light as it can be. Of the cuts of which that holds, later stages have what
    they can: those before them have more passes under way.
    """
    beside = [0.0] * pp
    beside[0] += first
    beside[-1] += last
    heaviest = min(
        weight
        for stage in {0, 1 % pp, pp - 1}
        for count in range(1, layers + 1)
        if sum(_fitting(weight := beside[stage] + count * layer, beside, layer)) >= layers
    )
    left, found = layers, list[int]()
    for before, most in reversed(list(enumerate(_fitting(heaviest, beside, layer)))):
        found.insert(0, left if before == 0 else min(most, left - before))
        left -= found[0]
    return tuple(found)


def _fitting(weight: float, beside: Sequence[float], layer: float) -> list[int]:
    """How many layers each stage has at the most where it weighs no more, one at the least."""
    return [max(1, int((weight - each) / layer + 1e-9)) for each in beside]
