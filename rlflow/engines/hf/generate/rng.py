"""Counter-based random numbers: Philox-4x32 with ten rounds, vectorised in numpy.

Philox is of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), section 4. A number is a pure function of its key and counter: no state, no order,
no device. This file knows nothing of models or batches.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
HIGH_BITS = np.uint64(6)
LOW_BITS = np.uint64(26)
UNIT = 2.0**-52


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, ...]:
    """Four random 32-bit words for every counter; words are held in uint64 arrays.

    `counter` is four arrays that broadcast together, each value below 2**32; `key` two
    numbers below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = (high >> HALF) ^ c1 ^ np.uint64(k0)
        c2 = (low >> HALF) ^ c3 ^ np.uint64(k1)
        c1, c3 = high & LOW, low & LOW
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & 0xFFFFFFFF, (k1 + KEY_INCREMENTS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def derive_key(*parts: int | str) -> tuple[int, int]:
    """A Philox key of any numbers and names; different parts give unrelated keys."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def uniforms(
    seed: int,
    iteration: int | NDArray[np.int64],
    stream: str,
    sample_ids: NDArray[np.int64],
    count: int,
    *,
    first: int | NDArray[np.int64] = 0,
) -> NDArray[np.float64]:
    """Numbers in (0, 1) for positions `first` to `first + count` of every sample.

    `sample_ids` is `[n]`, `first` one position for all or `[n]`, and so is
    `iteration`; the result float64
    `[n, count]`, with 52 random bits each. Each number depends on (seed, iteration, stream,
    sample id, position) and on nothing else.
    """
    ids = np.asarray(sample_ids).astype(np.uint64)[:, None]
    begin = np.asarray(first).astype(np.uint64).reshape(-1, 1)
    positions = begin + np.arange(count, dtype=np.uint64)[None, :]
    when = np.asarray(iteration).astype(np.uint64).reshape(-1, 1)
    words = philox((positions, when, ids & LOW, ids >> HALF), derive_key(seed, stream))
    bits = ((words[0] >> HIGH_BITS) << LOW_BITS) | (words[1] >> HIGH_BITS)
    return (bits.astype(np.float64) + 0.5) * UNIT


def permutation(n: int, seed: int, *salt: int | str) -> NDArray[np.int64]:
    """The numbers 0 to n - 1 in a random order, int64 `[n]`, a pure function of its arguments."""
    index = np.arange(n, dtype=np.uint64)
    zero = np.zeros(1, dtype=np.uint64)
    words = philox((index & LOW, index >> HALF, zero, zero), derive_key(seed, "permutation", *salt))
    order: NDArray[np.int64] = np.argsort((words[0] << HALF) | words[1], kind="stable")
    return order
