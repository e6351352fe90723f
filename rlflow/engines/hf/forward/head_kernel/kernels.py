"""The two kernels, a token each: numbers of its distribution, and the gradient of its logits.

The sum of exponentials is taken as its greatest score becomes known (Milakov and Gimelshein,
"Online normalizer calculation for softmax", arXiv:1805.02867, algorithm 3), the entropy's sum with
it. This file imports Triton, and is imported only where that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Logits of a token that a program holds at a time, and its warps of 32 threads.
BLOCK, WARPS = 4096, 8
# Stands for log 0 in `p log p`, as in `token_scores.LOWEST`.
LOW = tl.constexpr(-1e30)


@triton.jit
def formed_logits(
    raw: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:
    """Logits of a product in float32: times `scale`, and bounded by `cap`."""
    logit = raw.to(tl.float32) * scale
    if CAPPED:
        # tanh: 1 - 2 / (exp(2 y) + 1), which is -1 and 1 where the power is 0 and infinite.
        logit = cap * (1.0 - 2.0 / (tl.exp(2.0 * logit / cap) + 1.0))
    return logit


@triton.jit
def distribution(
    raw: tl.tensor, tokens: tl.tensor, found: tl.tensor, count: tl.tensor, start: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, coldness: tl.tensor,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Four numbers of row r of `raw [count, SIZE]` into `found [4, count]`, float32.

    The greatest score; the sum of exponentials relative to it; the score of `tokens[r]`, 0 where
    that is not among those from `start`; and with `ENTROPY` the sum of exponentials times scores,
    both relative to the greatest. Scores are logits times `coldness`, one over the temperature.
    """
    row = tl.program_id(0).to(tl.int64)
    high = LOW
    summed = 0.0
    weighed = 0.0
    for first in range(0, SIZE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < SIZE
        score = formed_logits(
            tl.load(raw + row * SIZE + place, mask=there, other=0.0), scale, cap, CAPPED
        )
        score = tl.where(there, score * coldness, -float("inf"))
        higher = tl.maximum(high, tl.max(score, 0))
        less = high - higher
        share = tl.exp(less)
        below = score - higher
        power = tl.exp(below)
        if ENTROPY:
            weighed = share * (weighed + less * summed)
            weighed += tl.sum(power * tl.maximum(below, LOW), 0)
        summed = share * summed + tl.sum(power, 0)
        high = higher
    token = tl.load(tokens + row) - start
    mine = (token >= 0) & (token < SIZE)
    chosen = tl.load(raw + row * SIZE + token, mask=mine, other=0.0)
    score = formed_logits(chosen, scale, cap, CAPPED) * coldness
    tl.store(found + row, high)
    tl.store(found + count + row, summed)
    tl.store(found + 2 * count + row, tl.where(mine, score, 0.0))
    if ENTROPY:
        tl.store(found + 3 * count + row, weighed)


@triton.jit
def pulled(
    raw: tl.tensor, tokens: tl.tensor, given: tl.tensor, count: tl.tensor, start: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, coldness: tl.tensor,
    SIZE: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient of a block of row r of `raw [count, SIZE]`, in its place.

    Of `given [4, count]` the first is the log of all exponentials' sum, then the entropy H, and
    the gradients g of the log-prob and e of the entropy. With log p = score - that log, a score's
    gradient is g onehot - p (g + e (log p + H)).
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < SIZE
    at = raw + row * SIZE + place
    logit = formed_logits(tl.load(at, mask=there, other=0.0), scale, cap, CAPPED)
    log_prob = tl.where(there, logit * coldness - tl.load(given + row), LOW)
    grad = tl.load(given + 2 * count + row)
    weight = -grad
    if ENTROPY:
        entropy = tl.load(given + count + row)
        pull = tl.load(given + 3 * count + row)
        weight = weight - pull * (tl.maximum(log_prob, LOW) + entropy)
    made = tl.exp(log_prob) * weight
    made += tl.where(place == tl.load(tokens + row) - start, grad, 0.0)
    made = made * coldness * scale
    if CAPPED:
        ratio = logit / cap
        made = made * (1.0 - ratio * ratio)
    tl.store(at, made.to(raw.dtype.element_ty), mask=there)
