"""How many rows a node makes of those that it reads: at most, at least, and on average.

Plain numbers that are known when a pipeline is declared. This file knows no node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The rows of one iteration: `groups` of them, `rows` in all, at most.

    There are at least `least` groups, and on average the share `expected` of all rows. Rows that
    are in no group count as a group each.
    """

    groups: int
    rows: int
    least: int
    expected: Fraction = Fraction(1)

    @property
    def fixed(self) -> bool:
        """Whether every iteration has as many groups as the others."""
        return self.least == self.groups

    @property
    def largest(self) -> int:
        """Rows of the largest group, where groups are of about equal size."""
        return math.ceil(self.rows / max(self.groups, 1))

    def as_data(self) -> list[int]:
        """The numbers, the share as its numerator and denominator."""
        share = self.expected
        return [self.groups, self.rows, self.least, share.numerator, share.denominator]

    @classmethod
    def from_data(cls, numbers: Sequence[int]) -> Counts:
        """The same again."""
        groups, rows, least, above, below = numbers
        return cls(groups=groups, rows=rows, least=least, expected=Fraction(above, below))

    def describe(self) -> str:
        """The printed form."""
        groups = f"{self.groups}" if self.fixed else f"{self.least} to {self.groups}"
        sure = self.fixed and self.expected == 1
        rows = f"{self.rows}" if sure else f"at most {self.rows}"
        mean = "" if self.expected == 1 else f", {float(self.rows * self.expected):.4g} expected"
        return f"{groups} groups, {rows} rows{mean}"
