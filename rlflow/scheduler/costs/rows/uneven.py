"""What the others wait for: the fullest of the parts that share rows, and the slowest replica.

Order statistics of lengths that are independent of each other, also within a prompt. Knows loads
and seconds of steps; no model and no plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from rlflow.scheduler.costs.lengths import Load, Stage, second_moment
from rlflow.scheduler.devices.efficiency import largest_normal

NORMAL = NormalDist()
# Seconds of a step of so many rows, each with so many tokens before.
Step = Callable[[float, float], float]
# What a row adds to a step is found at so many times the live rows.
MORE = 1.125
# A share of prompts that is so near a whole number is one.
NEARLY = 1e-9


def most_prompts(share: float) -> int:
    """Prompts of the fullest part, where the mean one has so many."""
    return max(math.ceil(share - NEARLY), 1)


def with_most(load: Load, parts: int) -> int:
    """How many of so many parts have as many prompts as the fullest."""
    over = load.dealt - math.floor(load.dealt + NEARLY)
    return parts if over <= NEARLY else max(round(parts * over), 1)


def fullest(load: Load) -> float:
    """Tokens of the fullest of the parts that end together, over those of the mean part."""
    return max(unbalanced(load), _by_count(load))


def unbalanced(load: Load) -> float:
    """The same where prompts can be shared out in equal numbers: what balancing tokens leaves.

    Rows are taken to be independent. The largest of p normal sums lies Blom's quantile above their
    mean; of parts with k groups balancing leaves a kth of a kth of that, as a simulation of
    the differencing method finds for 4 to 64 parts of 1 to 8 groups.
    """
    if load.peers < 2 or load.lengths.fixed:
        return 1.0
    return 1 + largest_normal(load.peers) * _of_group(load) / max(load.prompts, 1.0) ** 2


def _by_count(load: Load) -> float:
    """The same where some parts have a prompt more than others: those get shorter ones.

    Parts with the most, c groups each, have the share q of all groups. Balancing gives them sums of
    c that are the lowest q of normal ones, and so much shorter in the mean, as a simulation of the
    differencing method finds within 6 % for 4 to 40 parts and 1.25 to 6.4 groups in the mean.
    """
    mean, most = load.dealt, most_prompts(load.dealt)
    if load.peers < 2 or mean <= 1 or most - mean <= NEARLY:
        return 1.0
    share = (mean - most + 1) * most / mean
    lowest = NORMAL.pdf(NORMAL.inv_cdf(share)) / share if share < 1 else 0.0
    spread = 0.0 if load.lengths.fixed else _of_group(load)
    return (most - lowest * math.sqrt(most) * spread) / mean


def _of_group(load: Load) -> float:
    """The standard deviation of the tokens of a prompt and its rows, over their mean."""
    rows = max(load.rows / max(load.prompts, 1.0), 1.0)
    mean = load.lengths.mean + load.mean_prompt / rows
    return _deviation(load) / mean / math.sqrt(rows)


def _deviation(load: Load) -> float:
    return math.sqrt(max(second_moment(load.lengths) - load.lengths.mean**2, 0.0))


def slowest_replica(
    load: Load, found: Sequence[Stage], taken: Sequence[float], step: Step, room: float
) -> float:
    """Seconds of decoding until the slowest replica is done, over those of the stages `found`.

    These have the longest of all rows and the mean number of live ones, and a step of each has
    `taken` so many seconds. A replica's seconds are those of its longest row, of which the order
    statistics are exact, and what its other rows add: a sum, whose largest lies Blom's quantile
    above the mean. Of two independent normal variables the largest sum lies as far above the mean
    as the root of their squares; with a correlation of a half, about that of the longest row and
    the others, their product is added to the squares. A simulation with drawn lengths finds that
    within 3 % (`tests/scheduler/test_uneven.py`).
    """
    if load.peers < 2 or load.lengths.fixed:
        return 1.0
    total = longest = added = mean = square = 0.0
    for stage, seconds in zip(found, taken, strict=True):
        more = step(MORE * stage.live, load.mean_prompt + stage.age) - seconds
        row = min(max(more / (MORE - 1), 0.0), seconds) / stage.live
        total += stage.tokens * stage.goes_on * seconds
        only = stage.goes_on - stage.alone
        longest += stage.tokens * only * (seconds - (stage.live - 1) * row)
        one, alive = stage.tokens * row, 1 - stage.ended
        mean += one * alive
        square += (2 * added + one) * one * alive
        added += one
    deviation = math.sqrt(max(square - mean**2, 0.0))
    if room < load.rows:  # A row more makes no step fuller, it waits for room in one more.
        deviation = _deviation(load) * taken[0] / found[0].live
    others = math.sqrt(max(load.rows - 1, 0.0)) * deviation
    others *= largest_normal(with_most(load, load.peers))
    both = math.sqrt(longest**2 + longest * others + others**2)
    return 1 + (both - longest) / total if total else 1.0
