"""Which micro-batch a rank of a pipeline passes through which of its stages next, there or back.

One forward, one backward: a rank begins a backward as soon as it can, see
`rlflow.modelfiles.layouts.stages.ahead`. This file knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.modelfiles.layouts.stages import ahead


@dataclass(frozen=True, slots=True)
class StageTurn:
    """A pass of the micro-batch of a number through a rank's stage of a turn; or its way `back`."""

    micro: int
    turn: int
    back: bool = False


def forwards(passes: int, count: int, virtual: int = 1) -> Iterator[StageTurn]:
    """The forwards of a rank in their order, which all ranks have."""
    for start in range(0, passes, count):
        for turn in range(virtual):
            for micro in range(start, min(start + count, passes)):
                yield StageTurn(micro, turn)


def turns(passes: int, place: int, count: int, virtual: int = 1) -> Iterator[StageTurn]:
    """What a rank does in its order: forwards ahead, then one of each.

    With several stages on a rank `passes` are a multiple of `count`.
    """
    assert virtual == 1 or passes % count == 0, (passes, count)
    there = list(forwards(passes, count, virtual))
    back = [StageTurn(each.micro, virtual - 1 - each.turn, back=True) for each in there]
    begun = min(len(there), ahead(place, count, virtual))
    yield from there[:begun]
    for number, each in enumerate(back):
        yield from there[begun + number : begun + number + 1]
        yield each
