"""A hash of a parameter that does not depend on how it is cut up.

The hash is the sum, modulo 2**64, of one number per element: the output of the generator
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014) with the element's bits as seed, at the element's index within the whole parameter. So
the hashes of disjoint pieces add up to that of the whole, in any order. It detects errors, not
malice. This file knows no ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.contract.values import Box
from rlflow.engines.reshard.boxes import cut, shift, sizes, whole_box

MODULUS = 2**64
GAMMA = 0x9E3779B97F4A7C15 - MODULUS
FIRST = 0xBF58476D1CE4E5B9 - MODULUS
SECOND = 0x94D049BB133111EB - MODULUS
CHUNK = 1 << 18
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_box(tensor: Tensor, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The hash of the elements `tensor` at `box` of a parameter of `shape`, converted to `dtype`.

    Memory for a few times 2**18 numbers of 64 bits is taken on the tensor's device.
    """
    total = 0
    for part in cut(box, CHUNK):
        at = tuple(slice(start, stop) for start, stop in shift(part, box, whole_box(sizes(box))))
        bits = bits_of(tensor.detach()[at].to(dtype))
        total += int(_mix(bits, indices(part, shape, tensor.device).reshape(-1)).sum())
    return total % MODULUS


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of every element, as int64, flat."""
    flat = tensor.reshape(-1)
    return flat.view(INTEGERS[flat.element_size()]).to(torch.int64)


def indices(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The index of every element of a box within the whole parameter, row-major, int64."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), length in zip(box, shape, strict=True):
        along = torch.arange(start, stop, dtype=torch.int64, device=device)
        found = found[..., None] * length + along
    return found


def _mix(bits: Tensor, index: Tensor) -> Tensor:
    """SplitMix64's output number `index` from the seed `bits`; int64, wrapping."""
    state = bits + (index + 1) * GAMMA
    state = (state ^ shifted(state, 30)) * FIRST
    state = (state ^ shifted(state, 27)) * SECOND
    return state ^ shifted(state, 31)


def shifted(state: Tensor, count: int) -> Tensor:
    """A right shift that brings in zeros."""
    return (state >> count) & ((1 << (64 - count)) - 1)
