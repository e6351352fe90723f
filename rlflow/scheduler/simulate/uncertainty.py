"""How far estimates may be off, each from a published or measured source; and worlds drawn so.

A factor is what a world multiplies seconds, lengths or spreads by: log-normal, 1 in the median.
Spreads are standard deviations of its logarithm. Knows names and numbers; no plan.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from statistics import NormalDist

WORLDS = 200

# Root mean square of ln(predicted / measured) over the counted rows of published results, by what
# is predicted (`benchmarks/results/published.md`): so far estimates for accelerators may be off, a
# bias among it. Forwards are the rows of old log-probs and of the reference.
GENERATION, TRAINING, FORWARD, COPIES = 0.165, 0.15, 0.35, 0.315
# The same of whole iterations: what the device and the system have of it all actions share, and so
# do two placements.
ITERATION = 0.216
# Of the variance of a kind of work, the part that is a placement's own, as layouts and what runs
# beside them are, beyond what all actions share. Assumed.
OWN = 0.5
# The same of plans for a CPU, by tables and after a run (`benchmarks/results/prediction.md`). Rows
# were shorter than the tables assume, so this has the lengths in it.
CPU_TABLE, MEASURED = 0.917, 0.064
# Of ln(mean / limit / 0.5) over the published settings that say both (`benchmarks/published`):
# how far the mean length may be from half of the limit, which is assumed where nothing is known.
ASSUMED_MEAN = 0.614
# Of a mean that an earlier run has measured: weights have learned since. Assumed.
MEASURED_MEAN = 0.1
# Of the spread of lengths where no tail is known: at 512 rows from 3.5 to 8.5 means. Assumed.
ASSUMED_TAIL = 0.2


@lru_cache(maxsize=512)
def normal_draws(name: str, seed: int = 0, worlds: int = WORLDS) -> tuple[float, ...]:
    """A standard normal number of each world for a factor, evenly over its quantiles.

    Equal names have equal numbers in every plan and process (a Latin hypercube: McKay, Beckman and
    Conover 1979).
    """
    normal = NormalDist()
    values = [normal.inv_cdf((place + 0.5) / worlds) for place in range(worlds)]
    random.Random(f"{seed}/{name}").shuffle(values)  # noqa: S311
    return tuple(values)


def rates(own: str, shared: float, spread: float, seed: int = 0) -> list[float]:
    """What each world multiplies the seconds of an action by.

    Of two parts: one that all actions share, of so large a spread, and what is its `own` of the
    `spread` of its kind of work.
    """
    alone = spread * math.sqrt(OWN)
    pairs = zip(normal_draws("shared", seed), normal_draws(f"own {own}", seed), strict=True)
    return [math.exp(shared * one + alone * other) for one, other in pairs]
