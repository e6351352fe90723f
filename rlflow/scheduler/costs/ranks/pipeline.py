"""Seconds of passes that go through stages one behind the other.

One forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): the slowest stage
sets the pace, and the first pass goes through all of them. Ranks with several stages wait for a
part of that: what fills the pipeline is one of them on each. Knows neither graphs nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.roofline import Roofline


def through_stages(seconds: Sequence[float], passes: int, hop: float, virtual: int = 1) -> float:
    """Seconds until so many passes are through ranks that take `seconds` for all of them.

    A pass takes `hop` from a stage to the next, on its way there and back; ranks have `virtual`
    stages each.
    """
    slowest, first = max(seconds) / passes, sum(seconds) / passes
    filling = (first - slowest) / virtual + (len(seconds) - 1) * hop
    return passes * slowest + (passes - 1) * virtual * hop + filling


def piped(roof: Roofline, load: Load, seconds: Callable[[Roofline], float]) -> float:
    """Seconds of passes of a part's rows through all stages, each of which takes so many."""
    if roof.pp == 1:
        return seconds(roof)
    tokens = roof.ending(load)[0] / roof.passes(load)
    each = [one for stage, count in roof.stages for one in (seconds(stage),) * count]
    hop = roof.hop.send(hop_bytes(roof, tokens))
    return through_stages(each, roof.passes(load), hop, roof.virtual)


def hop_bytes(roof: Roofline, tokens: float) -> float:
    """Bytes that a rank sends to the next stage of a pass of so many tokens."""
    ranks = roof.tp.ranks if roof.sequence else 1
    return tokens * roof.shape.hidden * roof.size / ranks


def bubble(seconds: Sequence[float], passes: int, virtual: int = 1) -> float:
    """The share of its time that the slowest rank waits for others."""
    whole = through_stages(seconds, passes, 0.0, virtual)
    return 1 - max(seconds) / whole if whole else 0.0
