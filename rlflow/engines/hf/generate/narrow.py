"""Choosing a token without numbers in float64 over the vocabulary, for accelerators.

Probabilities are float32. Their sums over parts of the vocabulary are added up in float64, and so
are the numbers of the one part in which a token lies: a bound of the distribution function is off
by less than 1e-6, as a sum of float32 numbers is. Shapes do not depend on what is drawn, and no
number is asked for. This file knows neither models nor where the numbers come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.contract.values import Sampling
from rlflow.engines.hf.forward.vocabulary import AT_ONCE
from rlflow.engines.hf.generate.sampling import log_distribution

# Tokens of the vocabulary whose probabilities are added up in float32.
PART = 512
# Bits of the largest finite float32: every other one below it is between 0 and that.
LARGEST_BITS = 0x7F7FFFFF
BISECTIONS = 31


def draw_narrow(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What `sampling.draw_tokens` draws, up to rounding: int64 and float32 `[rows]`.

    `logits [rows, vocabulary]`, `uniform [rows]` float64.
    """
    scores = log_distribution(logits, sampling.temperature).float()
    if sampling.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        vocabulary = scores.shape[1]
        probs = scores.new_empty(len(scores), -(-vocabulary // PART) * PART)
        probs[:, vocabulary:] = 0
        torch.exp(scores, out=probs[:, :vocabulary])
        drop_unlikely(probs[:, :vocabulary], scores, sampling)
        tokens = invert_parts(probs, uniform)
    return tokens, scores.gather(1, tokens[:, None])[:, 0]


def invert_parts(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulated mass exceeds `uniform` times the whole, int64 `[rows]`.

    `probs [rows, parts * PART]`, not normalised.
    """
    parts = probs.view(len(probs), -1, PART)
    mass = parts.sum(-1).double().cumsum(-1)
    whole = mass[:, -1:]
    target = torch.minimum(uniform[:, None] * whole, torch.nextafter(whole, whole.new_zeros(())))
    # Of a row that is not finite none exceeds it.
    part = torch.searchsorted(mass, target, right=True).clamp(max=parts.shape[1] - 1)
    before = torch.where(part > 0, mass.gather(1, (part - 1).clamp(min=0)), 0.0)
    own = parts.gather(1, part[:, :, None].expand(-1, 1, PART))[:, 0].double()
    place = torch.searchsorted(own.cumsum(-1), target - before, right=True)
    # The part's sum and its tokens' may differ in the last bits.
    column = torch.arange(PART, device=probs.device)
    last = torch.where(own > 0, column, 0).amax(-1, keepdim=True)
    return (part * PART + torch.minimum(place, last))[:, 0]


def drop_unlikely(probs: Tensor, scores: Tensor, sampling: Sampling) -> None:
    """Set to zero in place what `top_k` and `top_p` exclude, by log-probs `scores`.

    Both `[rows, vocabulary]`. Kept are all tokens above a row's least score, and as many of
    those at it as there is room for, by id; see `sampling.top_candidates`.
    """
    vocabulary = scores.shape[1]
    keep = min(sampling.top_k, vocabulary) if sampling.top_k > 0 else vocabulary
    if keep == vocabulary and sampling.top_p >= 1:
        return
    step = max(1, AT_ONCE // vocabulary)
    for first in range(0, len(scores), step):
        part = scores[first : first + step]
        if keep < vocabulary:
            least, equal = least_of_top(part, keep, sampling.top_p)
        else:
            least, equal = least_of_nucleus(part, sampling.top_p)
        among = part == least
        among &= among.cumsum(-1, dtype=torch.int32) <= equal
        among |= part > least
        probs[first : first + step].masked_fill_(among.logical_not_(), 0)


def least_of_top(scores: Tensor, keep: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The least score kept of the `keep` likeliest, and how many tokens at it; `[rows, 1]`."""
    top = scores.topk(keep, -1).values
    count = torch.full_like(top[:, :1], keep, dtype=torch.int64)
    if top_p < 1:
        probs = top.double().exp()
        before = probs.cumsum(-1) - probs
        kept = before < top_p * probs.sum(-1, keepdim=True)
        count = kept.sum(-1, keepdim=True).clamp(min=1)
    least = top.gather(1, count - 1)
    return least, count - (top > least).sum(-1, keepdim=True)


def least_of_nucleus(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The same of the smallest set of likeliest tokens whose mass reaches `top_p`.

    It is the least score above which there is less mass than that. Numbers above zero are ordered
    as their bits, so it is found in as many halvings as a number has bits.
    """
    probs = scores.exp()
    wanted = top_p * mass_of(probs)
    low = torch.zeros_like(wanted, dtype=torch.int32)
    high = torch.full_like(low, LARGEST_BITS)
    for _ in range(BISECTIONS):
        middle = low + (high - low + 1) // 2
        less = mass_of(torch.where(scores > -middle.view(torch.float32), probs, 0.0)) < wanted
        low, high = torch.where(less, middle, low), torch.where(less, high, middle - 1)
    least = -low.view(torch.float32)
    above = mass_of(torch.where(scores > least, probs, 0.0))
    each = least.double().exp().clamp(min=torch.finfo(torch.float64).tiny)
    room = ((wanted - above) / each).ceil().clamp(1, scores.shape[1])
    return least, room.long()


def mass_of(probs: Tensor) -> Tensor:
    """The sums of `[rows, vocabulary]`, float64 `[rows, 1]`."""
    whole = probs.shape[1] // PART * PART
    parts = probs[:, :whole].reshape(len(probs), -1, PART)
    rest = probs[:, whole:].sum(-1, keepdim=True).double()
    return rest + parts.sum(-1).double().sum(-1, keepdim=True)
