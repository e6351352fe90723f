"""How much of a test is run: the examples that a property draws, the rows of a long table.

`make test` draws a quarter of the examples that a test asks for, and of a table that says
`pytest.mark.rows(n)` it runs n rows: others each week, so that all have their turn. Of the slow
tests of a file CI runs a fifth. `make test-slow` runs every row, `make test-long` ten times
the examples; `pytest` by hand runs what it is told.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from hashlib import blake2b

TIMES = float(os.environ.get("RLFLOW_EXAMPLES", "0.25"))
LEAST = 10
# Workers of one run have one week, whenever each of them looks.
WEEK = os.environ.setdefault("RLFLOW_WEEK", date.today().strftime("%G-%V"))
# Of the slow tests of a file one in so many.
SLOW_SHARE = 5
DRAWS = os.environ.get("RLFLOW_ROWS", "all") == "week"


def examples(count: int) -> int:
    """A quarter of `count` in `make test`, ten times as many as that says in `make test-long`.

    Where a quarter would be fewer than ten it is ten, or all where there are no ten.
    """
    return max(min(count, LEAST), round(count * TIMES))


def drawn(rows: Sequence[str], count: int, week: str = WEEK) -> frozenset[str]:
    """`count` of the rows of a table, or all where it has no more; which, depends on the week."""
    return frozenset(
        sorted(rows, key=lambda row: blake2b(f"{week} {row}".encode()).digest())[:count]
    )
