"""The time of a process's record: that of the wall clock when the process began, and what went by.

Whoever sets the wall clock meanwhile makes no action begin after its end.
"""

from __future__ import annotations

import time

_BEGAN = time.time() - time.perf_counter()


def clock() -> float:
    """Seconds since 1970 that only ever grow."""
    return _BEGAN + time.perf_counter()
