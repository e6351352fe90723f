"""A cyclic trace: memories, the actions that use them, and the gaps between uses of parts.

This file knows what fits, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A memory and the actions that use it, in cyclic order.

    `rooms` are the bytes that each action leaves to what it does not need; `places` are the
    actions' places in the list. `spare` is what all parts together leave free while no action
    runs, below 0 where they do not fit.
    """

    rooms: tuple[int, ...]
    places: tuple[int, ...]
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What lies between two uses of a part, at places `since` and `until` of the list.

    Staying takes `size` bytes on each of `rings` in every row (ring, index) of `rows`, which
    follow each other; leaving moves `cost` bytes out and back, 0 for what is thrown away.
    """

    size: int
    cost: int
    since: int
    until: int
    rings: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]

    def covers(self, place: int, length: int) -> bool:
        """Whether a place of a list of that length lies between the two uses."""
        reach = (self.until - self.since) % length or length
        return 0 < (place - self.since) % length < reach


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A cyclic trace of `length` actions: the memories, and the gaps that compete for room."""

    length: int
    rings: tuple[Ring, ...]
    gaps: tuple[Gap, ...]

    @cached_property
    def tight(self) -> dict[tuple[int, int], list[int]]:
        """The gaps of every row in which not all of them can stay."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, gap in enumerate(self.gaps):
            for row in gap.rows if gap.size else ():
                found.setdefault(row, []).append(number)
        return {row: held for row, held in found.items() if self.excess(row, held) > 0}

    @cached_property
    def _sizes(self) -> list[int]:
        return [gap.size for gap in self.gaps]

    def room(self, row: tuple[int, int]) -> int:
        """The bytes of a row."""
        return self.rings[row[0]].rooms[row[1]]

    def excess(self, row: tuple[int, int], held: Iterable[int]) -> int:
        """By how many bytes some gaps overflow a row; below 0 what they leave free."""
        sizes = self._sizes
        return sum([sizes[number] for number in held]) - self.room(row)

    def fits(self, stay: frozenset[int]) -> bool:
        """Whether all of `stay` can stay."""
        tight = self.tight.items()
        return all(self.excess(row, stay.intersection(held)) <= 0 for row, held in tight)

    def moved(self, stay: frozenset[int]) -> int:
        """The bytes that move in one turn where only `stay` stays."""
        return sum(gap.cost for number, gap in enumerate(self.gaps) if number not in stay)

    def filled(self, stay: frozenset[int], order: Iterable[int] | None = None) -> frozenset[int]:
        """`stay`, and all that fits beside it: what costs most first, then shorter gaps."""
        free = {
            row: self.room(row) - sum([self._sizes[n] for n in held if n in stay])
            for row, held in self.tight.items()
        }
        rows = self._tight_rows
        chosen = set(stay)
        for number in order or sorted(set(range(len(self.gaps))) - stay, key=self._worth):
            size = self._sizes[number]
            if all([free[row] >= size for row in rows[number]]):  # noqa: C419 - a hot loop
                chosen.add(number)
                for row in rows[number]:
                    free[row] -= size
        return frozenset(chosen)

    def _worth(self, number: int) -> tuple[int, int, int]:
        gap = self.gaps[number]
        return -gap.cost, len(gap.rows), number

    @cached_property
    def _tight_rows(self) -> list[list[tuple[int, int]]]:
        rows: list[list[tuple[int, int]]] = [[] for _ in self.gaps]
        for row, held in self.tight.items():
            for number in held:
                rows[number].append(row)
        return rows
