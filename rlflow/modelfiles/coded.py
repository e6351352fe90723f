"""Which moments are kept in 8 bits, and in blocks of how many numbers.

The engines and the plan go by the same rule (Dettmers et al. 2022, "8-bit optimizers via block-wise
quantization", arXiv:2110.02861).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 256
"""Neighbouring numbers of a row that have one scale, at the most."""
LEAST_BLOCK = 16
SMALLEST = 4096
"""Numbers of the smallest matrix whose moments are in 8 bits; of others they stay wide."""
CODING_BYTES = 8 + 4 * 4
"""Bytes a number while it is stepped: both moments wide, and what one is coded with."""


def block_of(shape: Sequence[int], parts: int = 1) -> int:
    """How many numbers of a row share a scale, the row being cut in so many parts; 0 for none.

    The largest power of two up to `BLOCK` that divides every part, so that no block is cut.
    Vectors, small matrices and rows that no such number divides stay wide.
    """
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return 0
    step = -(-shape[-1] // parts)
    block = math.gcd(BLOCK, step, shape[-1])
    return block if block >= LEAST_BLOCK else 0
