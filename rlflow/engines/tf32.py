"""TensorFloat-32 for matrix products of float32 numbers, where a placement says so.

A product takes 10 of the 23 bits of its factors' fractions and adds up in float32 (NVIDIA A100
white paper, 2020, "TF32"). Torch has one switch for a process, which also decides what precision
FlexAttention's kernels are compiled with. It is on while a use computes that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def changes_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether TF32 changes what a model computes: of float32 numbers on a CUDA device."""
    return dtype == torch.float32 and device.type == "cuda"


@contextmanager
def tf32_products(*, on: bool) -> Iterator[None]:
    """Within, products of float32 numbers on CUDA devices go by TF32 if `on`; else as before."""
    if not on:
        yield
        return
    cuda = torch.backends.cuda.matmul
    before = cuda.allow_tf32
    cuda.allow_tf32 = True
    try:
        yield
    finally:
        cuda.allow_tf32 = before
