"""Sums of squares of many numbers, to the rounding of few."""

from __future__ import annotations

import torch
from torch import Tensor

# Squares that are added up in the numbers' own precision: a CPU adds float32 ones one after the
# other, and of a hundred million a hundredth is lost.
AT_ONCE = 1 << 16


def square_sum(values: Tensor) -> Tensor:
    """The sum of the squares of all of a tensor's numbers, float64, 0-d."""
    whole = values.reshape(-1)
    cut = len(whole) // AT_ONCE * AT_ONCE
    rows = torch.linalg.vector_norm(whole[:cut].view(-1, AT_ONCE), dim=1).double()
    rest = torch.linalg.vector_norm(whole[cut:]).double()
    found: Tensor = rows.square().sum() + rest.square()
    return found
