"""How many rows a rollout hands on when, where it does so as they end.

Rows that end late are long: were all pieces of equally many rows, the last one would hold most of
the tokens, and who reads it would still work long after the rollout. So piece i of n has
n - i parts of the rows, for i = 0 to n - 1: of four pieces 4, 3, 2 and 1 tenths. Where lengths are
exponentially distributed, the later pieces then have about equally many tokens.
"""

from __future__ import annotations


def ended_rows(rows: int, pieces: int, count: int) -> int:
    """Rows that have been handed on after so many of `count` pieces."""
    return rows * pieces * (2 * count - pieces + 1) // (count * (count + 1))


def ended_share(pieces: int, count: int) -> float:
    """The same as a share of all rows."""
    return pieces * (2 * count - pieces + 1) / (count * (count + 1))
