"""Attention with values narrower than keys, by a kernel that takes them as wide.

Values, outputs and their gradients get zeros in the columns that they lack, which add nothing to
an output nor to the gradient of another column. This file knows neither kernels nor layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlflow.engines.hf.forward.sequences import SequenceAttention, Sequences, Visible


@dataclass(frozen=True, slots=True)
class PaddedValues:
    """What `way` computes, with values filled up to the size of keys."""

    way: SequenceAttention

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Sequences, seen: Visible
    ) -> tuple[Tensor, Tensor]:
        """See `SequenceAttention`; the output is as wide as `v`."""
        output, sums = self.way.forward(q, k, widened(v, k), runs, seen)
        narrow = output.narrow(-1, 0, v.shape[-1])
        return narrow.clone(memory_format=torch.contiguous_format), sums

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sums: Tensor,
        runs: Sequences,
        seen: Visible,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SequenceAttention`."""
        wide = widened(grad, k), q, k, widened(v, k), widened(output, k)
        grad_q, grad_k, grad_v = self.way.backward(*wide, log_sums, runs, seen)
        return grad_q, grad_k, grad_v.narrow(-1, 0, v.shape[-1])


def widened(x: Tensor, like: Tensor) -> Tensor:
    """`x` with columns of zeros up to the last size of `like`."""
    return pad(x, (0, like.shape[-1] - x.shape[-1]))
