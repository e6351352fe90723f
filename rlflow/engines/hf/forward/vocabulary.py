"""Distributions over the vocabulary: sums over it, its likeliest tokens, and log-probs at ids.

Logits are `[tokens, vocabulary]`; a distribution is softmax(logits / temperature), in float32 or
wider. Tokens are worked on a few at a time, so nothing else as large as the logits is kept. This
file knows neither models nor what the numbers are for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import Finding, RunError

SUMS = ("sum_pi_squared",)
TOP = ("top_log_probs", "top_ids", "top_rest")
"""The k likeliest tokens, the likeliest first, and the log-prob of all others together."""
CHOSEN = ("log_probs_at", "rest_at")
"""Log-probs at the ids that the batch has, and of all other tokens together."""
IDS = "top_ids"
# Numbers in float32 that are worked on at a time, 64 MiB of them.
AT_ONCE = 1 << 24


def distributions(
    logits: Tensor, outputs: Collection[str], temperature: float, top_k: int, ids: Tensor | None
) -> dict[str, Tensor]:
    """Those of `outputs` that are named above, by name.

    `sum_pi_squared`, `top_rest` and `rest_at` are `[tokens]`, the others `[tokens, k]`. `ids`
    int64 `[tokens, k]` are for `log_probs_at` and `rest_at`, which carry a gradient as
    `sum_pi_squared` does. Raises RunError for a k, or an id, beyond the vocabulary.
    """
    found: dict[str, Tensor] = {}
    if not set(outputs).isdisjoint(SUMS):
        found["sum_pi_squared"] = sum_pi_squared(logits, temperature)
    if not set(outputs).isdisjoint(TOP):
        found |= zip(TOP, likeliest(logits, temperature, top_k), strict=True)
    if not set(outputs).isdisjoint(CHOSEN):
        assert ids is not None, "log-probs at ids are asked for, and the batch has none"
        require_ids(ids, logits.shape[1])
        at = Chosen.apply(  # type: ignore[no-untyped-call]
            logits, ids.to(logits.device), temperature, "rest_at" in outputs
        )
        found |= zip(CHOSEN, at, strict=True)
    return found


def sum_pi_squared(logits: Tensor, temperature: float) -> Tensor:
    """`sum_v pi_v^2` of every token, `[tokens]`."""
    parts = []
    for part in _parts(logits):
        scores = _scores(logits[part], temperature)
        parts.append(((2 * scores).logsumexp(-1) - 2 * scores.logsumexp(-1)).exp())
    return torch.cat(parts)


@torch.no_grad()
def likeliest(logits: Tensor, temperature: float, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest tokens: log-probs and int64 ids `[tokens, k]`, and the rest's `[tokens]`.

    The rest is the log of the probability of all other tokens; -inf where there are none.
    """
    require_k(k, logits.shape[1])
    found = []
    for part in _parts(logits):
        scores = _scores(logits[part], temperature)
        whole = scores.logsumexp(-1, keepdim=True)
        top, ids = scores.topk(k, -1)
        rest = scores.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
        found.append((top - whole, ids, (rest - whole)[:, 0]))
    log_probs, ids, rest = (torch.cat(each) for each in zip(*found, strict=True))
    return log_probs, ids, rest


class Chosen(torch.autograd.Function):
    """Log-probs at some ids of each token, and of all other ids together."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float, with_rest: bool
    ) -> tuple[Tensor, Tensor]:
        """`ids` int64 `[tokens, k]`, distinct; the rest `[tokens]` is 0 where it is not wanted."""
        ctx.set_materialize_grads(False)
        found, wholes, rests = [], [], []
        for part in _parts(logits):
            scores, at = _scores(logits[part], temperature), ids[part]
            whole = scores.logsumexp(-1, keepdim=True)
            found.append(scores.gather(1, at) - whole)
            rest = torch.zeros_like(whole)
            if with_rest:
                rest = scores.scatter(1, at, -math.inf).logsumexp(-1, keepdim=True) - whole
            wholes.append(whole)
            rests.append(rest)
        whole, rest = torch.cat(wholes), torch.cat(rests)
        ctx.save_for_backward(logits, ids, whole, rest)
        ctx.temperature, ctx.with_rest = temperature, with_rest
        return torch.cat(found), rest[:, 0].clone()

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_rest: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        """D log p_i = onehot_i - p, and d log rest = p / rest outside of the ids, less p."""
        logits, ids, whole, rest = ctx.saved_tensors
        there = torch.isfinite(rest)
        pull, weight = torch.zeros_like(rest), torch.zeros_like(rest)
        if grad_rest is not None and ctx.with_rest:
            pull = torch.where(there, grad_rest[:, None], 0.0)
        if grad is not None:
            weight = grad.sum(-1, keepdim=True)
        made = torch.empty_like(logits)
        for part in _parts(logits):
            log_probs = _scores(logits[part], ctx.temperature) - whole[part]
            own = log_probs.exp() * (-weight - pull)[part]
            if grad is not None:
                own.scatter_add_(1, ids[part], grad[part])
            if grad_rest is not None and ctx.with_rest:
                share = log_probs - torch.where(there, rest, 0.0)[part]
                own += share.scatter(1, ids[part], -math.inf).exp() * pull[part]
            made[part] = own / ctx.temperature
        return made, None, None, None


def _parts(logits: Tensor) -> Iterator[slice]:
    """Slices of tokens, each of at most `AT_ONCE` numbers or one token; at least one."""
    tokens = max(1, AT_ONCE // logits.shape[1])
    for first in range(0, max(len(logits), 1), tokens):
        yield slice(first, first + tokens)


def _scores(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature


def require_k(k: int, vocabulary: int) -> None:
    """Refuse to look for more tokens than there are, or for none."""
    if not 1 <= k <= vocabulary:
        raise RunError(
            Finding(
                code="E635",
                what=f"the {k} likeliest tokens are asked for",
                got=f"a vocabulary of {vocabulary}",
                expected=f"top_k from 1 to {vocabulary}",
            )
        )


def require_ids(ids: Tensor, vocabulary: int) -> None:
    """Refuse ids that the model has no logit for, as another model's vocabulary may have."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise RunError(
            Finding(
                code="E636",
                what="log-probs are asked for at a token that the model does not have",
                got=f"token {int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())}",
                expected=f"tokens below {vocabulary}, the size of the model's vocabulary",
                fix="a smaller top_k, or a teacher with the student's vocabulary",
            )
        )
