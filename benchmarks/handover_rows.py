"""The rows that an engine answers in `vs_verl_handover.py`, the same ones on both sides.

Standard library only: rlflow's engine process, verl's worker and the report read it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

EOS = 1
# Tokens of the model whose tokenizer both sides have, without those that mean something.
FIRST, LAST = 3, 12
SHORTEST = 16

# The tokens of a response, the log-prob of each.
Answer = tuple[list[int], list[float]]


def answers(rows: int, response: int, *, ragged: bool) -> Iterator[Answer]:
    """Responses of `response` tokens, or of 16 to so many where they are `ragged`.

    One that is shorter ends with EOS. Log-probs are multiples of 2 ** -10, so that sums of them are
    exact.
    """
    drawn = random.Random(0)
    for _ in range(rows):
        length = drawn.randint(SHORTEST, response) if ragged else response
        tokens = [drawn.randint(FIRST, LAST) for _ in range(length)]
        if length < response:
            tokens[-1] = EOS
        yield tokens, [-drawn.randint(0, 4096) / 1024 for _ in range(length)]


def sums(rows: int, response: int, *, ragged: bool) -> tuple[float, float]:
    """The sum of all tokens, and that of their log-probs."""
    found = list(answers(rows, response, ragged=ragged))
    return float(sum(sum(tokens) for tokens, _ in found)), sum(sum(logs) for _, logs in found)
