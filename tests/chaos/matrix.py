"""The matrix of faults: what is done to a run, what is expected of it, and within which time.

Rows have the ids of their kind: K processes, D checkpoints and disks, R rewards, S programs that
nobody trusts, G rollouts and weights, N numerics, C what is refused before it starts, X security.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.scene import Scene

# What is expected: the run continues to the same bits; one typed error in time, from which it
# continues; it is refused before it starts; it goes on and counts what happened.
Expectation = Literal["continues", "error", "refused", "goes on"]
# A sample has rows that may take so many seconds; a machine with nothing else to do needs a tenth.
SHORT = 150.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault: `inject` does it and asserts what follows, `seconds` is its deadline in all.

    `needs` says what this machine may lack; a row that needs what it lacks says so. A row that is
    not its `own` is tests of other suites.
    """

    id: str
    fault: str
    expect: Expectation
    seconds: float = SHORT
    inject: Callable[[Scene], None] | None = None
    needs: Literal["", "ray", "sglang", "vllm", "gpu", "hosts"] = ""
    own: bool = True

    def __post_init__(self) -> None:
        assert self.inject is not None or self.needs == "gpu", self.id


def chosen(
    rows: Sequence[Row],
    *,
    beginnings: Sequence[str] = (),
    without: Collection[str] = (),
    count: int,
    seed: int,
) -> list[Row]:
    """The rows that are asked for, those that may take longest first: nobody waits for them last.

    Ids begin with one of `beginnings` where there are any; where `count` is less than all of the
    matrix, `sample` draws from what is left.
    """
    found = [
        row
        for row in rows
        if row.id not in without and (not beginnings or row.id.startswith(tuple(beginnings)))
    ]
    if count < len(rows):
        found = sample(found, count, seed)
    return sorted(found, key=lambda row: -row.seconds)


def sample(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """So many short rows, of every kind in turn as far as they go, the same for a seed.

    None that is tests of other suites: whoever draws runs those as well.
    """
    chance = random.Random(seed)
    kinds: dict[str, list[Row]] = {}
    short = [row for row in rows if row.seconds <= SHORT and row.own and not row.needs]
    for row in chance.sample(short, len(short)):
        kinds.setdefault(row.id[0], []).append(row)
    found: list[Row] = []
    while len(found) < min(count, len(short)):
        for left in kinds.values():
            if left and len(found) < count:
                found.append(left.pop())
    return sorted(found, key=rows.index)
