"""Log-probs of tokens and entropies of their distributions, of logits that are whole.

The backward pass works on the log-probs of the whole vocabulary, which are kept. This file knows
no model and no loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOWEST = -1e30
"""Stands for log 0 in `p log p`, which is 0 there."""


def token_scores(
    logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
) -> dict[str, Tensor]:
    """What `TokenScores` computes, by name."""
    log_probs, entropy = TokenScores.apply(  # type: ignore[no-untyped-call]
        logits, tokens, temperature, with_entropy
    )
    return {"log_probs": log_probs, "entropy": entropy}


def widen(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


class TokenScores(torch.autograd.Function):
    """The log-prob of one token per row, and the entropy of the row's distribution (nats)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """`logits [rows, vocabulary]` and `tokens [rows]`; entropy is zero where not wanted."""
        scores = widen(logits)
        if temperature != 1:
            scores = scores / temperature
        scores = scores.log_softmax(-1)
        log_probs = scores.gather(1, tokens[:, None])[:, 0]
        entropy = torch.zeros_like(log_probs)
        if with_entropy:
            entropy = -(scores.exp() * scores.clamp(min=LOWEST)).sum(-1)
        ctx.save_for_backward(scores, tokens, entropy)
        ctx.temperature, ctx.with_entropy, ctx.dtype = temperature, with_entropy, logits.dtype
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        """D log p(token) = onehot - p, and d H / d score_i = -p_i (log p_i + H), 0 at p_i = 0."""
        scores, tokens, entropy = ctx.saved_tensors
        weight = -grad[:, None]
        if ctx.with_entropy:
            surprise = scores.clamp(min=LOWEST) + entropy[:, None]
            weight = weight - grad_entropy[:, None] * surprise
        grad_scores = scores.exp().mul_(weight)
        grad_scores.scatter_add_(1, tokens[:, None], grad[:, None])
        if ctx.temperature != 1:
            grad_scores /= ctx.temperature
        return grad_scores.to(ctx.dtype), None, None, None
