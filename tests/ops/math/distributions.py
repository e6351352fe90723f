"""What the tests of several losses say of whole distributions and of parts of a step."""

from __future__ import annotations

import torch

from rlflow.engines.hf import microbatches
from rlflow.ops.math.losses.distillation import forward_kl_at, top_k_jsd


def generalized_jsd(student, teacher, mask, *, beta=0.5, temperature=1.0):
    """`top_k_jsd` of two sides' logits where k is the vocabulary: nothing is left for the rest."""
    own, other = ((each / temperature).log_softmax(-1) for each in (student, teacher))
    rest = torch.full(mask.shape, -torch.inf, dtype=student.dtype)
    return top_k_jsd(own, rest, other, rest, mask, beta=beta)


def top_k_forward_kl(student, teacher_log_probs, teacher_tokens, mask, **options):
    """`forward_kl_at` of the student's logits."""
    own = student.log_softmax(-1).gather(-1, teacher_tokens)
    return forward_kl_at(own, teacher_log_probs, mask, **options)


def combine(parts):
    """The metrics of a step from those of its micro-batches, as a trainer adds them up."""
    total = {}
    for part in parts:
        microbatches.add_metrics(total, part)
    return total
