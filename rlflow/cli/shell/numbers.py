"""Numbers that options take: counts and finite ones, each read once for all options."""

from __future__ import annotations

import math

import click


class Finite(click.FloatRange):
    """A number of a range that has an end: neither `nan`, which no range keeps out, nor `inf`."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number that a text says; fails as a usage error for what is none."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def is_count(text: str) -> bool:
    """Whether a text is 1, 2, 3 and so on in the digits 0 to 9, of which it has at most 18."""
    return len(text) <= 18 and text.isascii() and text.isdecimal() and int(text) > 0
