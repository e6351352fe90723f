"""How much of an optimizer's states is on the device at a time, where they are kept elsewhere.

Or in fewer bits. The engine cuts a step by the rule by which the plan counts it, which is here.
"""

from __future__ import annotations

PIECE_NUMBERS = 1 << 24
"""Numbers of each kind in one piece: 64 MiB of float32, which copies at the speed of its link."""
SLOTS = 3
"""Pieces on the device at once: one comes, one is computed with, one leaves."""
ROUNDING_BYTES = 4 + 4 + 4 + 2
"""Bytes beside a number's wide form while it is rounded: two of its hash, itself, what is left."""


def visiting_bytes(count: int, size: int) -> int:
    """Bytes of `count` numbers' states on the device at the most, `size` bytes for each number."""
    pieces = -(-count // PIECE_NUMBERS)
    return min(count, PIECE_NUMBERS) * min(pieces, SLOTS) * size


def widened_bytes(count: int, kinds: int) -> int:
    """Bytes of `kinds` numbers in float32 for each of a piece of `count`, and to round one kind."""
    return min(count, PIECE_NUMBERS) * (4 * kinds + ROUNDING_BYTES)
