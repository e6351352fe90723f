"""A matrix with its singular values made about 1, by products alone.

Five steps of the iteration of Jordan et al., "Muon: an optimizer for hidden layers in neural
networks" (2024), whose odd quintic takes every singular value of (0, 1] to about 0.7 to 1.2. On
accelerators in bfloat16, which that stands; on a CPU, whose bfloat16 products are no faster, in
the dtype of the matrix. This file knows no optimizer and no ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.modelfiles.orthogonal import COEFFICIENTS, STEPS

# A norm of less is taken as this: a matrix of zeros stays one.
LEAST_NORM = 1e-7


def orthogonal_dtype(matrix: Tensor) -> torch.dtype:
    """What is computed in."""
    return matrix.dtype if matrix.device.type == "cpu" else torch.bfloat16


def orthogonal(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """U S' V^T of a matrix `[rows, columns]` U S V^T, with S' about 1, in `dtype`.

    Of a matrix of lower rank the missing singular values stay 0.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(orthogonal_dtype(matrix) if dtype is None else dtype)
    found = found.T if tall else found
    # The Frobenius norm is no less than the largest singular value.
    found = found / torch.linalg.vector_norm(found).clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = found @ found.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, gram, found, beta=a)
    return found.T if tall else found
