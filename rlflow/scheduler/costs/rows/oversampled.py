"""A rollout that ends with the first so many of its groups: order statistics of their lengths.

A group of n rows is complete by token t with probability G(t) = F(t)^n, so of m groups fewer than k
are with that of a binomial variable of m and G below k, and then the rollout goes on. Where not
all rows can be live at once it is played with drawn lengths. What a step takes, the model's
roofline says.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from rlflow.scheduler.costs.lengths import (
    Load,
    ResponseLengths,
    Stage,
    between,
    length_grid,
    scaled_lengths,
)
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.rows.steady import (
    APART,
    MOST_GROUPS,
    MOST_PLAYED,
    drawn_length,
    drawn_lengths,
)

DRAWS = 16
# Beyond so many standard deviations from the mean a binomial variable has no mass to speak of.
FAR = 9.0


def first_seconds(roof: Roofline, load: Load, wanted: int) -> float:
    """Mean seconds until `wanted` groups are complete; `load` is a replica's share of all rows.

    Replicas go on together. Live rows are taken to be spread over them evenly.
    """
    n, parts = max(round(load.rows / load.prompts), 1), load.peers
    groups, room = round(load.prompts * parts), roof.at_once(load) * parts
    total = roof.gathered() if roof.gathers else 0.0
    total += roof.agreed(load.prompts * load.mean_prompt) + roof.prefill(load)
    step = roof.stepping()
    for stage in first_stages(load.lengths, groups, n, wanted, room):
        taken = step(max(stage.live / parts, 1.0), load.mean_prompt + stage.age)
        total += stage.tokens * stage.goes_on * taken
    return total


def of_first(lengths: ResponseLengths, groups: int, n: int, wanted: int) -> ResponseLengths:
    """Lengths of the rows of the first of so many groups: none longer than the last of them.

    Of m groups the first k lie at 1 / (m + 1) to k / (m + 1) of G in the mean, evenly: they are
    like all groups below (k + 1) / (m + 1), whose rows have all ended by the token t of that.
    """
    return between(lengths, 0.0, ((wanted + 1) / (groups + 1)) ** (1 / n))


def of_complete(lengths: ResponseLengths, n: float, since: float, until: float) -> ResponseLengths:
    """Lengths of the rows of those groups of n that are the shares `since` to `until` to end.

    The first share q of groups have all rows below the token t with F(t)^n = q: in the mean they
    are M(q) tokens long, and those between (until M(until) - since M(since)) / (until - since).
    """
    if lengths.fixed:
        return lengths
    found = between(lengths, 0.0, until ** (1 / n))
    if not since:
        return found
    before = between(lengths, 0.0, since ** (1 / n))
    mean = (until * found.mean - since * before.mean) / (until - since)
    return scaled_lengths(found, mean / found.mean, 1.0)


@lru_cache(maxsize=256)
def first_stages(
    lengths: ResponseLengths, groups: int, n: int, wanted: int, room: float = math.inf
) -> tuple[Stage, ...]:
    """Decoding until `wanted` of `groups` groups of `n` rows are complete, of all replicas.

    `goes_on` is the probability that it does, `live` how many rows are then live in expectation.
    """
    if groups * n > room:
        return tuple(_played(lengths, groups, n, wanted, room))
    return tuple(_at_once(lengths, groups, n, wanted))


def _at_once(lengths: ResponseLengths, groups: int, n: int, wanted: int) -> Iterator[Stage]:
    """All rows begin together. A row that is live leaves its group incomplete: m - 1 others."""
    for start, tokens in length_grid(lengths):
        alive = lengths.survival(start + tokens / 2 - 0.5)
        complete = (1 - alive) ** n
        goes_on = fewer(wanted, groups, complete)
        if goes_on < 1e-9:
            return
        live = groups * n * alive * fewer(wanted, groups - 1, complete) / goes_on
        yield Stage(start + tokens / 2, tokens, max(live, 1.0), goes_on, 1 - alive)


def fewer(wanted: int, trials: int, chance: float) -> float:
    """The probability that of so many independent trials fewer than `wanted` succeed."""
    if trials < wanted or chance <= 0:
        return 1.0
    if chance >= 1:
        return 0.0
    mean, width = trials * chance, FAR * math.sqrt(trials * chance * (1 - chance)) + FAR
    low = max(0, math.floor(mean - width))
    logs = math.log(chance), math.log1p(-chance)
    return min(
        sum(
            math.exp(
                math.lgamma(trials + 1)
                - math.lgamma(k + 1)
                - math.lgamma(trials - k + 1)
                + k * logs[0]
                + (trials - k) * logs[1]
            )
            for k in range(low, min(wanted, math.ceil(mean + width) + 1))
        ),
        1.0,
    )


def _played(
    lengths: ResponseLengths, groups: int, n: int, wanted: int, room: float
) -> Iterator[Stage]:
    """The mean of some draws; large batches are played as smaller ones with as much less room."""
    played = max(min(groups, MOST_GROUPS, MOST_PLAYED // n), 2)
    scale = groups / played
    until = min(max(round(wanted / scale), 1), played)
    source, spent = drawn_lengths(lengths, n), defaultdict[int, list[float]](lambda: [0.0] * 3)
    for _ in range(DRAWS):
        drawn = [[drawn_length(lengths, source) for _ in range(n)] for _ in range(played)]
        for steps, live, ages in _spans(drawn, until, max(int(room / scale), 1)):
            known = spent[round(math.log(live) / math.log(APART))]
            known[0] += steps
            known[1] += steps * live
            known[2] += steps * ages
    for many, rows, age in spent.values():
        yield Stage(age / rows, many / DRAWS, scale * rows / many, 1.0, 0.0)


def _spans(drawn: list[list[int]], until: int, room: int) -> Iterator[tuple[int, int, float]]:
    """Steps between the ends of rows, with the rows that are live and the sum of their ages."""
    waiting = [(group, length) for group, rows in enumerate(drawn) for length in rows]
    left, live = [len(rows) for rows in drawn], list[tuple[int, int, int]]()
    now = begun = sum_begun = complete = 0
    while complete < until:
        while begun < len(waiting) and len(live) < room:
            group, length = waiting[begun]
            heapq.heappush(live, (now + length, group, now))
            sum_begun += now
            begun += 1
        end, group, began = live[0]
        if end > now:
            yield end - now, len(live), len(live) * (now + end) / 2 - sum_begun
        heapq.heappop(live)
        now = end
        sum_begun -= began
        left[group] -= 1
        complete += not left[group]
