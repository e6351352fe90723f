"""How far the fullest part of a batch is from the mean part, and pairs of rows of many lengths.

Ranks wait for the one with the most tokens. Parts are balanced by tokens where they have several
groups of rows (`rlflow.runtime.execute.rows.balanced`), and cannot be where each has one. Knows
rows and lengths; neither models nor devices.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from rlflow.scheduler.costs.lengths import STEPS, Lengths, Load


def fullest(load: Load) -> float:
    """Tokens of the fullest of the parts that end together, over those of the mean part.

    Rows are taken to be independent. The largest of p normal sums lies Blom's quantile above their
    mean; of parts with k groups balancing leaves a kth of a kth of that, as a simulation of
    the differencing method finds for 4 to 64 parts of 1 to 8 groups.
    """
    if load.peers < 2 or load.lengths.fixed:
        return 1.0
    rows = max(load.rows / max(load.prompts, 1.0), 1.0)
    mean = load.lengths.mean + load.prompt / rows
    spread = math.sqrt(max(second_moment(load.lengths) - load.lengths.mean**2, 0.0))
    above = NormalDist().inv_cdf((load.peers - 0.375) / (load.peers + 0.25))
    return 1 + above * spread / mean / math.sqrt(rows) / max(load.prompts, 1.0) ** 2


def attended_pairs(load: Load) -> float:
    """Pairs of a token and one that it attends to, where rows are of many lengths."""
    lengths = load.lengths
    own = lengths.mean**2 if lengths.fixed else second_moment(lengths)
    of_responses = load.rows * (lengths.mean * load.prompt + own / 2)
    return load.prompts * load.prompt**2 / 2 + of_responses


@lru_cache(maxsize=256)
def second_moment(lengths: Lengths) -> float:
    """The mean of the squares of the lengths: twice the sum over t of t S(t)."""
    width = lengths.longest / STEPS
    middles = ((step + 0.5) * width for step in range(STEPS))
    return 2 * sum(width * at * lengths.survival(at) for at in middles)
