"""How much of an optimizer's states is on the device at a time, where they stay on the host.

The engine cuts a step by the rule by which the plan counts it, which is here.
"""

from __future__ import annotations

PIECE_NUMBERS = 1 << 24
"""Numbers of each kind in one piece: 64 MiB of float32, which copies at the speed of its link."""
SLOTS = 3
"""Pieces on the device at once: one comes, one is computed with, one leaves."""


def visiting_bytes(count: int, size: int) -> int:
    """Bytes of `count` numbers' states on the device at the most, `size` bytes for each number."""
    pieces = -(-count // PIECE_NUMBERS)
    return min(count, PIECE_NUMBERS) * min(pieces, SLOTS) * size
