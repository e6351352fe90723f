"""How many examples a property test draws: what it says, times what the run asks for."""

from __future__ import annotations

import os

TIMES = float(os.environ.get("RLFLOW_EXAMPLES", "1"))


def examples(count: int) -> int:
    """So many examples in `make test`, ten times as many in `make test-long`."""
    return max(1, round(count * TIMES))
