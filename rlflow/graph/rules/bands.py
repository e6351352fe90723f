"""Rows of different lengths are read in two bands, where the last are much shorter than the first.

Keys and values of rows lie in a buffer as wide as the longest row, and attention reads all columns
of a band. Rows that enter lie behind those that are there, so the last are about the shortest. Pure
functions of numbers, for the engine that decodes and for who plans it.
"""

from __future__ import annotations

from collections.abc import Sequence

# A second band takes as long, in a layer, as it takes to read about so many columns of one row: at
# 0.1 ms for its calls, and 1 kB a column from a cache of 10 GB/s.
CALLS = 1024
# Where there are more rows, as many of them are looked at together as make so many blocks.
BLOCKS = 64


def first_narrow(columns: Sequence[float]) -> int:
    """The first row of the second band; as many as there are rows if one band is shorter.

    `columns` are those that each row needs, in the order in which they lie.
    """
    total, widest = len(columns), max(columns, default=0)
    each = max(-(-total // BLOCKS), 1)
    found, least, behind = total, widest * total, 0.0
    for first in range((total - 1) // each * each, 0, -each):
        behind = max(behind, *columns[first : first + each])
        read = first * widest + (total - first) * behind + CALLS
        if read < least:
            found, least = first, read
    return found


def columns_read(columns: Sequence[float], narrow: int) -> float:
    """The columns of all rows that are read in a step whose second band begins at `narrow`."""
    bands = columns[:narrow], columns[narrow:]
    return sum(max(rows, default=0) * len(rows) for rows in bands)


def moves_up(place: int, count: int, narrow: int) -> list[int]:
    """Places of which each gets the row of the next when the row at the first, `place`, ends.

    There are `count` rows, of which the second band begins at `narrow`. A row of the first band is
    followed by the last one there, and whoever that was by the last of all, so that no short row
    comes to lie among long ones.
    """
    places = [place]
    for last in (min(narrow, count) - 1, count - 1):
        if places[-1] < last:
            places.append(last)
    return places
