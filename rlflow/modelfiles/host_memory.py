"""What lies in host memory for a device takes there: the rule of the plan and of the runtime."""

from __future__ import annotations

PAGE = 4096
"""Bytes of a page: a device's driver keeps whole pages where they are."""
LOADING_PIECE = 64 << 20
"""The most bytes of a tensor that loading rounds, or puts together, on a host at a time."""


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that `size` bytes take which a device copies by itself."""
    return -(-size // PAGE) * PAGE
