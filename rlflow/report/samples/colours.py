"""Numbers of tokens as colours: what they are measured against, and a scale from -1 to 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

COLOURS = ("advantage", "log-prob", "ratio", "entropy")
# A log-prob of this many nats below zero, and an entropy of so many, has the whole colour.
NATS = 5.0
# So has a ratio of this much, or one over it.
RATIO = 2.0


def colour_scale(what: str, values: Sequence[float], most: float = 0.0) -> list[float]:
    """Numbers of tokens from -1 to 1: 0 has no colour; what is not finite is -1.

    Advantages are taken against the largest, `most` if that is more; log-probs are negative, so
    likely tokens stay plain.
    """
    if what == "advantage":
        known = (abs(v) for v in values if math.isfinite(v))
        top = max([*known, most]) or 1.0
        return [_bounded(v / top) for v in values]
    if what == "log-prob":
        return [_bounded(v / NATS) for v in values]
    if what == "ratio":
        return [_bounded(math.log(v) / math.log(RATIO)) if v > 0 else -1.0 for v in values]
    return [_bounded(v / NATS) for v in values]


def _bounded(value: float) -> float:
    return max(-1.0, min(1.0, value)) if math.isfinite(value) else -1.0
