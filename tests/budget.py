"""How many examples a property test draws: what it says, times what the run asks for."""

from __future__ import annotations

import os

TIMES = float(os.environ.get("RLFLOW_EXAMPLES", "0.5"))
LEAST = 10


def examples(count: int) -> int:
    """Half of `count` in `make test`, ten times as many as that says in `make test-long`.

    Where half would be fewer than ten it is ten, or all where there are no ten.
    """
    return max(min(count, LEAST), round(count * TIMES))
