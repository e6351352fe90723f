"""Models whose linear layers are held in 8-bit floats, with a scale for each block of 128 x 128.

Which layers those are, how many bytes fewer that is, and which models an engine can cut so.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.scheduler.models.shapes import Shape

BLOCK = 128
KEYS = ("k_proj", "v_proj")
ATTENTION = ("q_proj", *KEYS, "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
VALUE_BYTES, SCALE_BYTES = 1, 4


def spared_bytes(shape: Shape, size: int, ranks: int) -> int:
    """Bytes fewer on each of so many ranks, where a number outside of these layers has `size`.

    Of keys and values that ranks repeat each spares them.
    """
    parts, keys = shape.parts_of_keys(ranks), shape.layers * _spared(shape, KEYS, size)
    every = shape.layers * _spared(shape, (*ATTENTION, *FEED_FORWARD), size)
    return every // ranks + keys * (ranks - parts) // (ranks * parts)


def _spared(shape: Shape, names: Sequence[str], size: int) -> int:
    """Bytes fewer of the layers of those names, as far as they are known."""
    widths = [shape.linear(name) for name in names]
    known = [pair for pair in widths if pair is not None]
    numbers = sum(ins * outs for ins, outs in known)
    scales = sum(-(-ins // BLOCK) * -(-outs // BLOCK) for ins, outs in known)
    return numbers * (size - VALUE_BYTES) - scales * SCALE_BYTES


def misfits_blocks(shape: Shape, ranks: int) -> str:
    """Why the layers of a model cannot be cut into blocks on so many ranks; empty where they can.

    Layers of one input are one matrix in an engine, whose parts begin at a block each, on every
    rank. A rank has one head of keys at the least.
    """
    if shape.experts or shape.latent:
        return "its layers have experts" if shape.experts else "its keys are latent"
    keys = max(shape.kv_heads // ranks, 1) * shape.head_dim
    sides = {
        "queries": shape.heads * shape.head_dim // ranks,
        "keys": keys,
        "the feed-forward layer": shape.ffn // ranks,
    }
    wrong = [f"{name} of {width}" for name, width in sides.items() if width % BLOCK]
    return f"a rank has {' and '.join(wrong)}" if wrong else ""
