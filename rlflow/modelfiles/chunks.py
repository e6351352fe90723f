"""How many tokens' distributions over a vocabulary are in memory at a time on an accelerator.

A forward that scores tokens takes them through the head in chunks, and so does its backward. The
plan counts what a chunk holds and the engine cuts by the same rule, which is here.
"""

from __future__ import annotations

CHUNK_BYTES = 1 << 30
"""What the distributions of one chunk may hold, with all that is made of them."""
WIDE_BYTES = 4


PRODUCT = 0
"""Where kernels read the product as it is, nothing but that is alive."""
PLAIN = 2
"""Numbers alive for each logit while log-probs and entropies are made: scores and their powers."""
SHAPED = 3
"""The same of logits with a soft cap, which are kept for the backward."""
MOST = 4
"""With all else that is made of distributions: sums of squares, likeliest tokens, the others'."""


def number_bytes(size: int, numbers: int = PLAIN) -> int:
    """Bytes for each logit of a chunk, where a number of the model takes `size`.

    All but the product itself, and its gradient, are in float32 or wider.
    """
    return numbers * max(size, WIDE_BYTES) or size


def chunk_tokens(vocabulary: int, size: int, limit: int = CHUNK_BYTES, numbers: int = PLAIN) -> int:
    """Tokens of one chunk over `vocabulary` logits, at least one."""
    return max(1, limit // (vocabulary * number_bytes(size, numbers)))


def chunk_bytes(tokens: float, vocabulary: int, size: int, numbers: int = PLAIN) -> int:
    """Bytes that the distributions of so many tokens hold at the most."""
    held = min(tokens, chunk_tokens(vocabulary, size, numbers=numbers))
    return int(held * vocabulary * number_bytes(size, numbers))
