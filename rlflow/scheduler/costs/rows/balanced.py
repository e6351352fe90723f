"""A rollout whose replicas even their live rows every so many turns: what that saves, and costs.

Of n rows on m replicas n S(t) are live at token t in expectation, and the fullest replica, which
the others wait for, has about an mth of them where rows move. Where they stay it has as many as the
largest of m binomial variables. An engine in a process of its own gives no keys and values out: all
that a row has seen is read again, as if nothing of it were in the other's cache. Knows rooflines;
neither plans nor measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rlflow.scheduler.costs.lengths import Load, ResponseLengths, Stage, full_lengths, length_grid
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.rows.oversampled import fewer, first_stages
from rlflow.scheduler.devices.efficiency import largest_normal

# Sums of binomial probabilities are added up for so many rows in the mean; more are normal.
FEW = 48
# Of rows that end one by one in a window of turns, the spread is in the mean so much of the last.
WITHIN = 2 / 3
# A rank's difference from the mean is a whole number of rows: so much less moves of it.
ROUNDED = 0.1
# Bytes that a replica tells the others when rows move: a few numbers of rows.
TOLD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRow:
    """Seconds that a row of mean length takes to move, in both ways; `size` bytes are its cache.

    `cache` is None where the engine gives none out. The row has `tokens` by then.
    """

    cache: float | None
    reread: float
    size: int
    tokens: int

    @property
    def shorter(self) -> Literal["cache", "reread"]:
        """The way that takes less."""
        return "reread" if self.cache is None or self.reread < self.cache else "cache"

    @property
    def seconds(self) -> float:
        """What that way takes."""
        return self.reread if self.cache is None else min(self.cache, self.reread)


def moved_row(roof: Roofline, load: Load) -> MovedRow:
    """What it takes to move a row that has half of a mean response."""
    context = load.mean_prompt + load.lengths.mean / 2
    size = int(context * roof.cache_bytes + roof.shape.carried(roof.size))
    tokens = max(round(context), 1)
    one = Load(rows=1.0, prompts=1.0, prompt=tokens, lengths=full_lengths(1))
    sent = roof.replicas.send
    reread = sent(8 * tokens) + roof.prefill(one)
    cache = sent(size) if roof.serving is None else None
    return MovedRow(cache=cache, reread=reread, size=size, tokens=tokens)


def balanced_seconds(roof: Roofline, load: Load, every: int, wanted: int | None = None) -> float:
    """Mean seconds until all groups are complete, or `wanted`; `load` is a replica's share.

    Replicas meet every so many turns, or in every one where groups may be dropped. Engines in
    processes of their own meet by the clock, beside what they decode.
    """
    total = roof.gathered() if roof.gathers else 0.0
    total += roof.agreed(load.prompts * load.mean_prompt) + roof.prefill(load)
    step, a_move = roof.stepping(), moved_row(roof, load).seconds
    met = 2 * roof.replicas.all_gather(TOLD) if roof.serving is None else 0.0
    room = roof.at_once(load)
    room = room if room < load.rows else math.inf
    for stage, fullest, moved in balanced_stages(load, every, wanted, room):
        taken = step(fullest, load.mean_prompt + stage.age)
        taken += met / (every if wanted is None else 1) + moved * a_move
        total += stage.tokens * stage.goes_on * taken
    return total


def balanced_stages(
    load: Load, every: int, wanted: int | None = None, room: float = math.inf
) -> list[tuple[Stage, float, float]]:
    """Stages of all replicas, the rows of the fullest in each, and how many rows move a turn.

    Each replica has room for so many rows at once; the others wait.
    """
    n, ranks = max(round(load.rows / load.prompts), 1), load.peers
    groups = round(load.prompts * ranks)
    found = []
    for stage in first_stages(load.lengths, groups, n, wanted or groups, room * ranks):
        rows = round(load.rows * ranks)
        alive = min(stage.live * stage.goes_on / rows, 1.0)
        even = stage.live / ranks + (ranks - 1) / (2 * ranks)
        if wanted is None:
            even = mean_share(rows, alive, ranks) / stage.goes_on
        # Of the rows that a replica has at first in a window so many end within it, by chance.
        ending = min(stage.live / ranks * hazard(load.lengths, stage, every), stage.live / ranks)
        stays = mean_fullest(round(load.rows), alive, ranks) / stage.goes_on
        fullest = min(even + WITHIN * largest_normal(ranks) * math.sqrt(ending), stays, room)
        # The last row of each rank stays.
        moved = max(1 - ranks / stage.live, 0.0) * moves(ending, ranks) / every
        found.append((stage, max(fullest, 1.0), moved))
    return found


def moves(ending: float, ranks: int) -> float:
    """Rows that move after `ending` rows of each of so many ranks have ended, in the mean.

    One by one every fourth that ends has one of two ranks two rows emptier: a walk of steps of 1
    takes four from 0 to 2. Of many half of the mean deviation moves, rounded down in each rank.
    """
    others = 1 - 1 / ranks
    if ranks * ending <= 1:
        return ranks * ending * others / 2
    return ranks * (math.sqrt(ending * others / (2 * math.pi)) - ROUNDED)


def hazard(lengths: ResponseLengths, stage: Stage, turns: float) -> float:
    """The share of rows that live in the middle of a stage and end within so many turns."""
    alive = lengths.survival(stage.age - 0.5)
    return 1 - lengths.survival(stage.age - 0.5 + turns) / alive if alive else 1.0


@lru_cache(maxsize=4096)
def mean_share(rows: int, alive: float, ranks: int) -> float:
    """The mean of N / m rounded up, of N rows that are live by chance `alive` each."""
    if rows * alive > FEW:
        return rows * alive / ranks + (ranks - 1) / (2 * ranks)
    shares = range(-(-rows // ranks))
    return sum(1 - fewer(share * ranks + 1, rows, alive) for share in shares)


@lru_cache(maxsize=4096)
def mean_fullest(rows: int, alive: float, ranks: int) -> float:
    """The mean of the largest of m binomial variables, of as many rows each."""
    if rows * alive > FEW:
        return rows * alive + largest_normal(ranks) * math.sqrt(rows * alive * (1 - alive))
    return sum(1 - fewer(k + 1, rows, alive) ** ranks for k in range(rows))


def staying_stages(load: Load) -> list[tuple[Stage, float]]:
    """The same stages where rows stay where they began: the rows of the fullest replica."""
    rows, found = round(load.rows), []
    for start, tokens in length_grid(load.lengths):
        alive = load.lengths.survival(start + tokens / 2 - 0.5)
        fullest = mean_fullest(rows, alive, load.peers)
        if fullest > 1e-9:
            found.append((Stage(start + tokens / 2, tokens, fullest, 1.0, 1 - alive), fullest))
    return found
