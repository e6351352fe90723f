"""How many tokens' distributions over a vocabulary are in memory at a time on an accelerator.

A forward that scores tokens takes them through the head in chunks, and so does its backward. The
plan counts what a chunk holds and the engine cuts by the same rule, which is here.
"""

from __future__ import annotations

CHUNK_BYTES = 1 << 30
"""What the distributions of one chunk may hold, with all that is made of them."""
WIDE_BYTES = 4


def number_bytes(size: int) -> int:
    """Bytes for each logit of a chunk, where a number of the model takes `size`.

    Logits and their gradient are of the model's dtype; up to four numbers in float32 or wider
    stand beside them: scores, probabilities, and two that outputs are made from.
    """
    return 2 * size + 4 * max(size, WIDE_BYTES)


def chunk_tokens(vocabulary: int, size: int, limit: int = CHUNK_BYTES) -> int:
    """Tokens of one chunk over `vocabulary` logits, at least one."""
    return max(1, limit // (vocabulary * number_bytes(size)))


def chunk_bytes(tokens: float, vocabulary: int, size: int) -> int:
    """Bytes that the distributions of so many tokens hold at the most."""
    held = min(tokens, chunk_tokens(vocabulary, size))
    return int(held * vocabulary * number_bytes(size))
