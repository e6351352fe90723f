"""What kernels reach of an accelerator's peaks, from published measurements; nothing of a CPU.

A figure is of a device or of a kind of kernel, never of a run: sources stand beside them. Knows
kinds of devices and sizes of products; neither models nor plans.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

# Of the dense bfloat16 peak, what the best shape of a product gets, a mean over 100 times: Bekman,
# "Machine Learning Engineering", table of maximum achievable matmul FLOPS (torch 2.5 to 2.10). A
# kind that is not in the table has what an H100 has: assumed.
BEST_PRODUCT = {
    "a100": 0.869,
    "a800": 0.869,
    "h100": 0.803,
    "h800": 0.803,
    "h200": 0.803,
    "b200": 0.776,
    "gb200": 0.729,
    "mi300x": 0.514,
}
UNKNOWN_PRODUCT = 0.803
# What the products of a layer get of the best shape. With what else a layer computes it makes the
# hardware FLOPS utilisation of LLM Foundry's tables for FSDP, of 1B to 30B: 0.60 to 0.77 on A100
# and 0.42 to 0.59 on H100, where this has 0.63 to 0.73 and 0.49 to 0.64.
LAYER_SHAPES = 0.9

# Tiles of a product on a multiprocessor, and how many of those there are: data sheets. The last
# wave of tiles is half empty in the mean (NVIDIA, "Matrix multiplication background user's guide").
TILE_ROWS, TILE_COLUMNS = 128, 256
LAST_WAVE = 0.5
MULTIPROCESSORS = {
    "a100": 108,
    "a800": 108,
    "h100": 132,
    "h800": 132,
    "h200": 132,
    "h20": 78,
    "b200": 148,
    "gb200": 152,
    "l40s": 142,
    "rtx4090": 128,
    "mi300x": 304,
}

# Of the peak, what attention over long causal rows gets: FlashAttention-2 on A100 (Dao 2023:
# 50 to 73 %, forward and backward), 35 % of an H100 (Shah et al., "FlashAttention-3", 2024).
# Ada's multiprocessors are of Ampere's make: as A100, which is assumed, and an H20's peak is below
# its softmax's rate: 66 of 148 Tflop/s over 2,048 causal tokens (Dao-AILab, issue 1310), where this
# has 71. A B200 runs its instructions of Ampere no faster than an H100 does: 361 of 2,250 Tflop/s
# forward (tritonbench, pull request 171), 346 with the backward (Dao-AILab, issue 1589). Others as
# H100: assumed.
ATTENTION = {
    "a100": 0.6,
    "a800": 0.6,
    "h20": 0.6,
    "l40s": 0.6,
    "rtx4090": 0.6,
    "b200": 0.16,
    "gb200": 0.16,
}
UNKNOWN_ATTENTION = 0.35
# Of FlashAttention-2's rate, what a kernel gets that FlexAttention compiles: 90 % forward, and 85 %
# backward, which is two thirds of the time (Dong et al., PyTorch's blog, August 2024).
FLEX_SHARE = 0.87
# Bytes that blocks of matrix products read and write of each score of a forward, counted of
# `PlainSequences`: to float32, by the scale, its log-sum, its power, and that in the model's dtype.
BLOCK_BYTES = 40
# Tokens of a row at which attention gets half of that: assumed, after the curves of Dao 2023 over
# lengths of 512 to 16,384 (figure 5, causal, heads of 128).
HALF_LENGTH = 512

# Seconds in which a kernel begins and ends and memory is idle, beyond what there is between two
# kernels: decoding Llama-1B takes twice the time of its bytes at batch 1 on an H100, with about a
# hundred kernels and 1.3 us between two (Spector et al., "No Bubbles", 2025): 0.74 ms more.
RAMP = 4e-6
# Of the memory's bandwidth, what attention of one token a row gets from blocks of many rows of
# uneven lengths: assumed, below what one stream gets (0.8).
CACHE_READ = 0.65

# Bytes that operators of PyTorch read and write one after the other, of each number: a norm in
# float32 (twice), its addition, what turns queries and keys, a gated unit; counted of Qwen2.
NORM_BYTES, ROTARY_BYTES, GATED_BYTES = 34, 16, 10
# Of each number of the hidden states that a token's experts read and make, counted of `own_experts`
# in two bytes: picked (read, written), by its weight (the same), added up (read twice, written).
# And of each that goes to another rank and comes back, counted of `dispatched_experts`: picked, put
# into a message, taken out of it, and added up with those of others.
ROUTED_BYTES, SENT_BYTES = 14, 20
# And of each logit: to float32, by the temperature, its log-softmax and entropy; the same, with a
# backward that makes them again; and of a drawn token.
SCORED_BYTES, LEARNED_BYTES, DRAWN_BYTES = 44, 110, 30


# How fast devices of one kind are, as a standard deviation: their whiskers, of 1.5 quartile ranges
# and 5.4 deviations of a normal, span 8 % in the mean over clusters and programs (Sinha et al.,
# "Not all GPUs are created equal", SC 2022, arXiv:2208.11035). Outliers up to 1.5 times slower are
# left out: a cluster takes such devices away.
DEVIATION = 0.08 / 5.4


def slowest(devices: int) -> float:
    """How much longer the slowest of so many devices takes than the mean one, as a factor."""
    return 1 + DEVIATION * largest_normal(devices)


@lru_cache(maxsize=1024)
def largest_normal(count: int) -> float:
    """The expected largest of so many standard normal variables (Blom 1958)."""
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def sustained(name: str) -> float:
    """The part of the peak that products of a layer get on a kind, where they fill it."""
    return BEST_PRODUCT.get(name, UNKNOWN_PRODUCT) * LAYER_SHAPES


def filled(chip: str, rows: float, columns: float) -> float:
    """The part of a chip's multiprocessors that are busy in a product of that size."""
    tiles = max(rows / TILE_ROWS, 1.0) * max(columns / TILE_COLUMNS, 1.0)
    waves = tiles / MULTIPROCESSORS.get(chip, MULTIPROCESSORS["h100"])
    return waves / (waves + LAST_WAVE)


def attended(chip: str, row: float) -> float:
    """The part of the peak that attention over causal rows of so many tokens gets."""
    return ATTENTION.get(chip, UNKNOWN_ATTENTION) * row / (row + HALF_LENGTH)
