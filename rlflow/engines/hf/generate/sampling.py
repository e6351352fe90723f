"""Choosing a token: the inverse of the distribution function at one uniform number per row.

A row's token depends on its own logits and its own number, never on the rows beside it.
This file knows neither models nor where the numbers come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.contract.values import Sampling
from rlflow.errors import Finding, NumericsError


def draw_tokens(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row of `logits [rows, vocabulary]` with `uniform [rows]` (float64).

    Returns tokens int64 `[rows]` and their log-probs float32 `[rows]` under the whole
    distribution at the sampling temperature (at temperature 1 where it is 0, greedy).
    """
    scores = log_distribution(logits, sampling.temperature)
    if sampling.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        tokens = invert(top_candidates(scores.double().exp(), sampling), uniform)
    return tokens, scores.gather(1, tokens[:, None])[:, 0].float()


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature), at least float32; temperature 0 stands for 1."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if temperature not in {0, 1}:
        scores = scores / temperature
    return scores.log_softmax(-1)


def top_candidates(probs: Tensor, sampling: Sampling) -> Tensor:
    """Set to zero what `top_k` and `top_p` exclude; not normalised again.

    The nucleus is the smallest set of the likeliest tokens whose sum reaches `top_p`
    (Holtzman et al. 2019, section 3.1), taken among the `top_k`; equal tokens go by id.
    """
    vocabulary = probs.shape[-1]
    keep = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary
    if keep == vocabulary and sampling.top_p >= 1:
        return probs
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    ordered[:, keep:] = 0
    if sampling.top_p < 1:
        before = ordered.cumsum(-1) - ordered
        ordered[before >= sampling.top_p * ordered.sum(-1, keepdim=True)] = 0
    return torch.zeros_like(probs).scatter_(1, index, ordered)


def invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulated mass exceeds `uniform` times the whole, int64 `[rows]`."""
    mass = probs.cumsum(-1)
    whole = mass[:, -1:]
    # A target that rounds up to the whole would fall beyond the last token of positive mass.
    target = torch.minimum(uniform[:, None] * whole, torch.nextafter(whole, whole.new_zeros(())))
    # Of a row that is not finite none exceeds it: the last token, whose log-prob says so.
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def require_finite(log_probs: Tensor) -> None:
    """Raise NumericsError E652 for log-probs of drawn tokens that are not finite.

    A token that was drawn has a probability above 0, so its logits were not finite, and that is
    said of weights that have diverged.
    """
    bad = int((~log_probs.isfinite()).sum())
    if bad:
        raise NumericsError(
            Finding(
                code="E652",
                what=f"the logits of {bad:,} of {len(log_probs):,} sampled tokens are not finite",
                expected="finite logits: the weights of the model have diverged",
                fix="a lower lr: --set lr=... --allow-changes lr, beside --resume",
            )
        )
