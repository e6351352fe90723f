"""Rewards of a row that follow from its length alone.

This file knows neither how a response was scored nor what becomes of the reward.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def overlong_penalty(
    length: Tensor, *, max_length: int, buffer: int, factor: float = 1.0, floor: bool = True
) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.4, eq. 13).

        0                                                   n <= max_length - buffer
        factor (max_length - buffer - n) / buffer           up to max_length
        -factor                                             beyond

    `length` int64 `[rows]` is n, the response tokens of each row; returns float32 `[rows]`, to
    be added to the reward. `buffer` is above 0; the paper has 20480, 4096 and a factor of 1.
    With `floor=False` the second line goes on beyond `max_length`.

    A degenerate group is to be looked for in the rewards before they are shaped: lengths make
    a group of equal answers look as if it taught something.

    Others: verl and AReaL have no floor, OpenRLHF has one. AReaL leaves tokens of tools out of n,
    verl counts them.
    """
    room = (max_length - buffer) - length.double()
    penalty = (factor * room / buffer).clamp(max=0)
    return (penalty.clamp(min=-factor) if floor else penalty).float()
