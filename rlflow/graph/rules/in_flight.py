"""Which groups a continuous rollout hands on, and when it may: the one rule that bounds their age.

In iteration i the first (i + `span` + 1) `batch` groups may begin, in their order, and `batch` of
them are handed on: those that are complete first, as long as every group that stays can still leave
within `span` iterations of the one in which it began. Of the groups whose last iteration is d or
before, (d - i) `batch` may stay; of those beyond, as many as that have to leave now, and are waited
for. Nothing that begins later has an earlier last iteration, and no more are here than leave in
`span` + 1 iterations, so that never asks for more than `batch`: no group is ever too old, and none
waits for good. Pure functions of numbers; this file knows no engine and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


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
