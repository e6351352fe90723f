"""Which micro-batch a rank of a pipeline passes through which of its stages next, there or back.

One forward, one backward: a rank begins a backward as soon as it can, see
`rlflow.modelfiles.layouts.stages.ahead`. A backward may be in two halves, of which the second,
gradients of weights, fills what would be waiting. This file knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlflow.modelfiles.layouts.stages import ahead, weights_behind

# There; back, which gives the stage before its gradient; and the gradients of weights left of that.
Way = Literal["forward", "backward", "weights"]


@dataclass(frozen=True, slots=True)
class StageTurn:
    """A pass of the micro-batch of a number through a rank's stage of a turn, one `way`."""

    micro: int
    turn: int
    way: Way = "forward"

    @property
    def back(self) -> bool:
        """Whether it takes a gradient from the stage after it, and gives one back."""
        return self.way == "backward"


def forwards(passes: int, count: int, virtual: int = 1) -> Iterator[StageTurn]:
    """The forwards of a rank in their order, which all ranks have."""
    for start in range(0, passes, count):
        for turn in range(virtual):
            for micro in range(start, min(start + count, passes)):
                yield StageTurn(micro, turn)


def turns(
    passes: int, place: int, count: int, virtual: int = 1, *, split: bool = False
) -> Iterator[StageTurn]:
    """What a rank does in its order: forwards ahead, then one of each.

    With several stages on a rank `passes` are a multiple of `count`. Where backwards are `split`
    gradients of weights come `weights_behind` (ZB-H1 of Qi et al., "Zero Bubble Pipeline
    Parallelism", arXiv:2401.10241, section 2.1); a first stage has none behind, and whole ones.
    """
    assert virtual == 1 or (passes % count == 0 and not split), (passes, count, split)
    there = list(forwards(passes, count, virtual))
    back = [StageTurn(each.micro, virtual - 1 - each.turn, "backward") for each in there]
    late = [StageTurn(each.micro, each.turn, "weights") for each in back]
    begun = min(len(there), ahead(place, count, virtual))
    behind = weights_behind(place) if split else 0
    yield from there[:begun]
    for number, each in enumerate(back):
        yield from there[begun + number : begun + number + 1]
        yield each
        if behind:
            yield from late[max(0, number - behind) : max(0, number - behind + 1)]
    if behind:
        yield from late[max(0, len(late) - behind) :]
