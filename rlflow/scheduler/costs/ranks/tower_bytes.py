"""Bytes that the pictures of a pass take in a vision tower: while they pass, and to a backward.

Knows widths and rows; neither devices nor a graph.
"""

from __future__ import annotations

import math

from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.models.shapes import Shape


def tokens_seen(load: Load, tokens: float) -> float:
    """Of so many tokens of a pass those that may stand for pictures, which are of whole prompts."""
    if load.pictures is None:
        return 0.0
    prompts = load.prompts * min(tokens / max(load.most_tokens, 1.0), 1.0)
    return min(load.pictures.longest * math.ceil(prompts), tokens)


def passing_bytes(shape: Shape, size: int, load: Load, tokens: float) -> int:
    """Bytes that one layer of the tower holds, and the pixels, before the language model begins."""
    if shape.eyes is None:
        return 0
    seen = tokens_seen(load, tokens)
    each = shape.eyes.layer_bytes(size) + shape.eyes.pixels * size
    return int(seen * shape.eyes.patches * each + shape.eyes.mask_bytes(seen, size))


def left_bytes(shape: Shape, size: int, load: Load, tokens: float) -> int:
    """Bytes that pictures leave to the backward of what is trained of the tower."""
    if shape.eyes is None:
        return 0
    parts = {part: shape.trains(part) for part in ("vision", "projector")}
    seen = tokens_seen(load, tokens)
    return int(shape.eyes.left(seen, size, vision=parts["vision"], projector=parts["projector"]))
