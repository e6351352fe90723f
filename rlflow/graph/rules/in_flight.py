"""Which groups a continuous rollout hands on, and when it may: the one rule that bounds their age.

In iteration i the first (i + `span` + 1) `batch` groups may begin, in their order, and `batch` of
them are handed on: those that are complete first, as long as every group that stays can still leave
within `span` iterations of the one in which it began. Of the groups whose last iteration is d or
before, (d - i) `batch` may stay; of those beyond, as many as that have to leave now, and are waited
for. Nothing that begins later has an earlier last iteration, and no more are here than leave in
`span` + 1 iterations, so that never asks for more than `batch`: no group is ever too old, and none
waits for good.

That alone has iterations come in bursts: one waits for a long row, and while it does, the groups of
the next become complete, which then decodes nothing beside its update. So an iteration whose groups
are complete works ahead, at a `Pace` that follows from the turns that it has made before.

Several replicas share the groups by `Dealing`. Their clock is the turn, in which every live row of
all of them gets a token, so whoever knows which rows ended in which turn deals alike. Pure
functions of numbers; this file knows no engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# Of the turns of an iteration in the mean, this part is made in each: less leaves bursts, more is
# made with few rows. The mean forgets in so many iterations. Fewer rows than this part of the room
# decode better beside those that begin in the next iteration.
SHARE, OVER, FEW = 0.75, 8, 1 / 8
# What replicas tell each other in the place of a row: one has been asked to stop.
STOP = -1


@dataclass(frozen=True, slots=True)
class Pace:
    """The turns of an iteration in the mean, as far as there were any; 0 before the first."""

    mean: float = 0.0

    @property
    def least(self) -> int:
        """How many turns an iteration makes at least, unless few rows are live."""
        return math.floor(SHARE * self.mean)

    def few(self, room: int) -> int:
        """Of fewer live rows than this no turn is made ahead, where there is room for so many."""
        return max(math.ceil(FEW * room), 1)

    def after(self, turns: int) -> Pace:
        """The pace after an iteration that made so many."""
        return Pace(self.mean + (turns - self.mean) / (OVER if self.mean else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`batch` groups an iteration, each of which leaves at most `span` iterations after it began.

    Groups are numbered from 0 in the order in which they begin. `begun` has the iteration in which
    each group began that is here, `ended` those of them that are complete, the earliest first.
    """

    batch: int
    span: int

    def open_until(self, iteration: int) -> int:
        """The number of the first group that may not begin in an iteration."""
        return (iteration + self.span + 1) * self.batch

    def _wanted(self, begun: Mapping[int, int], iteration: int) -> Iterator[tuple[int, int]]:
        """How many have to leave of those that began by some iteration: (by then, how many)."""
        counts = Counter(begun.values())
        here = sum(many for first, many in counts.items() if first < iteration - self.span)
        for last in range(iteration, iteration + self.span + 1):
            here += counts[last - self.span]
            wanted = here - (last - iteration) * self.batch
            if wanted > 0:
                yield last - self.span, wanted

    def met(self, begun: Mapping[int, int], ended: Sequence[int], iteration: int) -> bool:
        """Whether enough groups are complete for an iteration to hand on."""
        if len(ended) < self.batch:
            return False
        first = [begun[group] for group in ended]
        return all(
            sum(each <= by for each in first) >= wanted
            for by, wanted in self._wanted(begun, iteration)
        )

    def taken(self, begun: Mapping[int, int], ended: Sequence[int], iteration: int) -> list[int]:
        """The groups that an iteration hands on, ascending.

        Raises AssertionError where too few are complete, and where one would be too old.
        """
        assert self.met(begun, ended, iteration), f"too few groups are complete in {iteration}"
        chosen: list[int] = []
        for by, wanted in self._wanted(begun, iteration):
            missing = wanted - sum(begun[group] <= by for group in chosen)
            old = [group for group in ended if begun[group] <= by and group not in chosen]
            chosen += old[: max(missing, 0)]
        rest = [group for group in ended if group not in chosen]
        chosen += rest[: self.batch - len(chosen)]
        assert len(chosen) == self.batch, f"{len(chosen)} groups have to leave in {iteration}"
        late = [group for group in begun if begun[group] + self.span < iteration]
        assert not late, f"groups {late} began more than {self.span} iterations before {iteration}"
        return sorted(chosen)


@dataclass(slots=True)
class Dealing:
    """Which of so many replicas decodes a group: the one with the fewest live rows, all its rows.

    Together they have room for so many live rows, or for one group. So what begins when is the same
    for any number of replicas, and each has at most a group more than its share. `live` has the
    rows of each.
    """

    replicas: int
    room: int
    live: list[int] = field(init=False)
    homes: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Nobody has rows yet."""
        self.live = [0] * self.replicas

    @property
    def total(self) -> int:
        """The live rows of all replicas."""
        return sum(self.live)

    def go_on(self, rows: Mapping[int, int]) -> None:
        """Deal groups that have begun, with so many rows each, the largest first."""
        for group in sorted(rows, key=lambda group: (-rows[group], group)):
            self._take(self._emptiest(), group, rows[group])

    def begins(self, group: int, rows: int) -> bool:
        """Deal a group that is to begin; False where there is no room for it."""
        if self.total and self.total + rows > self.room:
            return False
        self._take(self._emptiest(), group, rows)
        return True

    def ends(self, group: int, home: int | None = None) -> None:
        """A row of a group has ended: in its `home`, where rows move, else in its group's."""
        self.live[self.homes[group] if home is None else home] -= 1

    def evened(self) -> Iterator[tuple[int, int]]:
        """Move rows one by one until no replica has two more than another; (from, to) of each."""
        while max(self.live) - min(self.live) > 1:
            fullest = max(range(self.replicas), key=self.live.__getitem__)
            emptiest = self._emptiest()
            self.move(fullest, emptiest)
            yield fullest, emptiest

    def move(self, source: int, target: int, rows: int = 1) -> None:
        """Rows have gone from one replica to another."""
        self.live[source] -= rows
        self.live[target] += rows

    def _emptiest(self) -> int:
        return min(range(self.replicas), key=self.live.__getitem__)

    def _take(self, home: int, group: int, rows: int) -> None:
        self.homes[group] = home
        self.live[home] += rows
