"""Log-probs, entropies and other numbers of distributions, straight from hidden states.

Logits are made for a chunk of tokens at a time and made again in the backward pass, so never more
than one chunk of `[tokens, vocabulary]` is in memory (Wijmans et al., "Cut your losses",
arXiv:2411.09009, section 4.3, in parts of tokens). Ranks that share the vocabulary keep their part
of it, and add up numbers of tokens: greatest, sum of exponentials, and what depends on them
(Shoeybi et al., arXiv:1909.08053, section 3). This file knows no model and no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlflow.engines.hf.forward.head_kernel.rows import (
    RowPulls,
    kernels_fit,
    numbers_by_row,
    pull_rows,
)
from rlflow.engines.hf.forward.kernels import product
from rlflow.engines.hf.forward.shares import (
    ChunkNumbers,
    Projection,
    Sums,
    WantedNumbers,
    chunk_numbers,
    hide,
    own_places,
    token_numbers,
)
from rlflow.engines.hf.forward.token_scores import LOWEST
from rlflow.modelfiles.chunks import MOST, PLAIN, PRODUCT, SHAPED, chunk_tokens

# Rows of a weight whose gradients are added at a time where the sum is of another dtype.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Pulls:
    """The gradients `[tokens]` of one temperature's outputs, `at [tokens, k]`; None where zero."""

    log_probs: Tensor | None
    entropy: Tensor | None
    squared: Tensor | None
    at: Tensor | None
    rest: Tensor | None


class ChunkedScores(torch.autograd.Function):
    """Numbers of the distributions that `hidden [tokens, in]` predict.

    Log-probs of `tokens` and entropies (nats) are `[tokens, temperatures]`; `sum p^2 [tokens]`;
    log-probs at int64 `ids [tokens, k]` and of all others together; and of the likeliest, without
    gradient, log-probs, ids and the log-prob of all others together. What is not asked for is
    None. Gradients of hidden states, weight and bias are exact; the weight's is summed in float32
    or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        ids: Tensor | None,
        asked: WantedNumbers,
        form: Projection,
    ) -> tuple[Tensor | None, ...]:
        """`weight [part of the vocabulary, in]` and its `bias` are this rank's."""
        ctx.set_materialize_grads(False)
        chunks: list[list[ChunkNumbers]] = []
        ctx.by_rows = kernels_fit(hidden, asked, chosen=ids is not None, biased=bias is not None)
        for part in chunks_of(hidden, weight, asked, form, by_rows=ctx.by_rows):
            if ctx.by_rows:
                raw = product(hidden[part], weight)
                chunks.append([numbers_by_row(raw, tokens[part], asked, form)])
                del raw
                continue
            logits = logits_of(product(hidden[part], weight, bias), form)
            at = None if ids is None else ids[part]
            chunks.append(
                [chunk_numbers(scores_at(logits, t, asked), tokens[part], at, asked, form)
                 for t in asked.temperatures]
            )  # fmt: skip
            del logits
        made = [
            token_numbers([chunk[place] for chunk in chunks], asked, form)
            for place in range(len(asked.temperatures))
        ]
        log_probs = torch.stack([one.log_probs for one in made], -1)
        entropies = [one.entropy for one in made if one.entropy is not None]
        entropy = torch.stack(entropies, -1) if entropies else None
        first = made[0]
        kept = [t for one in made for t in (one.sums.greatest, one.sums.log_sum)]
        ctx.save_for_backward(
            hidden, weight, bias, tokens, ids, entropy, first.squared, first.rest, *kept
        )
        ctx.asked, ctx.form = asked, form
        top = first.top or (None, None, None)
        ctx.mark_non_differentiable(*(each for each in top if each is not None))
        return log_probs, entropy, first.squared, first.at, first.rest, *top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Each chunk's logits again, the gradient of its scores, and what follows from that."""
        hidden, weight, bias, tokens, ids, entropy, squared, rest, *kept = ctx.saved_tensors
        asked, form = ctx.asked, ctx.form
        on_hidden, on_weight, on_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if on_hidden else None
        into = WeightGradient(weight) if on_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide_of(bias)) if on_bias else None
        sums = [Sums(*kept[i : i + 2]) for i in range(0, len(kept), 2)]
        whole = (entropy, squared, rest)
        for part in chunks_of(hidden, weight, asked, form, by_rows=ctx.by_rows):
            if ctx.by_rows:
                pulls = row_pulls(grads, sums[0], entropy, part)
                low = pull_rows(product(hidden[part], weight), tokens[part], pulls, asked, form)
            else:
                at = None if ids is None else ids[part]
                total = pulled_product(
                    logits_of(product(hidden[part], weight, bias), form), grads, sums, whole, part,
                    tokens[part], at, asked, form,
                )  # fmt: skip
                if grad_bias is not None:
                    grad_bias += total.sum(0)
                low = total.to(hidden.dtype)
                del total
            if grad_hidden is not None:
                grad_hidden[part] = product(low, weight.t())
            if into is not None:
                into.add(low, hidden[part])
            del low
        if grad_hidden is not None and form.group is not None:
            dist.all_reduce(grad_hidden, group=form.group)
        grad_weight = None if into is None else into.total()
        low_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, low_bias, None, None, None, None


def chunks_of(
    hidden: Tensor, weight: Tensor, asked: WantedNumbers, form: Projection, *, by_rows: bool
) -> Iterator[slice]:
    """Slices of tokens whose distributions hold at most the bytes of the limit, or of one token.

    Kernels that go by rows of a product hold nothing beside it.
    """
    numbers = PRODUCT if by_rows else PLAIN if form.cap is None else SHAPED
    if len(asked.temperatures) > 1 or asked.squared or asked.rest or asked.top_k:
        numbers = MOST
    tokens = chunk_tokens(len(weight), hidden.element_size(), asked.limit, numbers)
    for first in range(0, len(hidden), tokens):
        yield slice(first, first + tokens)


def wide_of(x: Tensor) -> torch.dtype:
    """float32, or float64 where `x` is."""
    return torch.promote_types(x.dtype, torch.float32)


def logits_of(raw: Tensor, form: Projection) -> Tensor:
    """The logits of a product `raw`, in float32 or wider; `raw` itself may be overwritten."""
    logits = raw.to(wide_of(raw))
    if form.scale != 1:
        logits.mul_(form.scale)
    if form.cap is not None:
        logits.div_(form.cap).tanh_().mul_(form.cap)
    return logits


def through_form(grad: Tensor, logits: Tensor, form: Projection) -> Tensor:
    """The gradient of the product, in place of that of `logits`, which may be overwritten."""
    if form.cap is not None:
        grad.mul_(logits.div_(form.cap).square_().neg_().add_(1))
    return grad if form.scale == 1 else grad.mul_(form.scale)


def scores_at(
    logits: Tensor, temperature: float, asked: WantedNumbers, *, keep: bool = False
) -> Tensor:
    """Scores that may be overwritten; the logits stay where they are read once more."""
    if keep or len(asked.temperatures) > 1:
        return logits / temperature
    return logits if temperature == 1 else logits.div_(temperature)


def pulled_product(
    logits: Tensor,
    grads: tuple[Tensor | None, ...],
    sums: list[Sums],
    whole: tuple[Tensor | None, Tensor | None, Tensor | None],
    part: slice,
    tokens: Tensor,
    ids: Tensor | None,
    asked: WantedNumbers,
    form: Projection,
) -> Tensor:
    """The gradient of the product that gave a chunk's `logits`, which are overwritten.

    Of all temperatures, in float32 or wider.
    """
    total = None
    for place, temperature in enumerate(asked.temperatures):
        scores = scores_at(logits, temperature, asked, keep=form.cap is not None)
        one = pulled_scores(
            scores, sums[place], pulls_of(grads, place, part), whole, place, part, tokens, ids, form
        )
        one = one if temperature == 1 else one.div_(temperature)
        total = one if total is None else total.add_(one)
        del scores, one
    assert total is not None
    return through_form(total, logits, form)


def row_pulls(
    grads: tuple[Tensor | None, ...], sums: Sums, entropy: Tensor | None, part: slice
) -> RowPulls:
    """What the kernels' backward has of a chunk's tokens."""
    own = pulls_of(grads, 0, part)
    return RowPulls(
        level=sums.greatest[part] + sums.log_sum[part],
        entropy=None if entropy is None else entropy[part, 0],
        on_log_prob=own.log_probs,
        on_entropy=own.entropy,
    )


def pulls_of(grads: tuple[Tensor | None, ...], place: int, part: slice) -> Pulls:
    """The gradients of a chunk's outputs at one temperature."""
    log_probs, entropy = (None if g is None else g[part, place] for g in grads[:2])
    if place:
        return Pulls(log_probs, entropy, None, None, None)
    squared, at, rest = (None if g is None else g[part] for g in grads[2:5])
    return Pulls(log_probs, entropy, squared, at, rest)


def pulled_scores(
    scores: Tensor,
    sums: Sums,
    grads: Pulls,
    whole: tuple[Tensor | None, Tensor | None, Tensor | None],
    place: int,
    part: slice,
    tokens: Tensor,
    ids: Tensor | None,
    form: Projection,
) -> Tensor:
    """The gradient of a chunk's `scores [tokens, part of the vocabulary]`, which are overwritten.

    With p = softmax(scores): d log p(i) = onehot_i - p; dH = -p (log p + H), 0 at p = 0;
    d sum p^2 = 2 p (p - sum p^2); d log rest = p / rest outside of the ids, less p.
    """
    entropy, squared, rest = (None if each is None else each[part] for each in whole)
    scores.sub_(sums.greatest[part, None]).sub_(sums.log_sum[part, None])
    level = torch.zeros_like(sums.log_sum[part])
    beyond = None
    if grads.log_probs is not None:
        level -= grads.log_probs
    if grads.at is not None:
        level -= grads.at.sum(-1)
    if grads.rest is not None and rest is not None and ids is not None:
        there = torch.isfinite(rest)
        pull = torch.where(there, grads.rest, 0.0)
        level -= pull
        beyond = scores.sub(torch.where(there, rest, 0.0)[:, None])
        beyond = hide(beyond, ids, form).exp_().mul_(pull[:, None])
    probs = scores.exp()
    made = probs.mul_(pull_weights(probs, scores, level, grads, entropy, squared, place))
    if beyond is not None:
        made += beyond
    for grad, at in ((grads.log_probs, tokens[:, None]), (grads.at, ids)):
        if grad is not None and at is not None:
            spot, own = own_places(at, made.shape[1], form)
            added = grad.view(at.shape)
            made.scatter_add_(1, spot, added if own is None else added.masked_fill(~own, 0.0))
    return made


def pull_weights(
    probs: Tensor,
    scores: Tensor,
    level: Tensor,
    grads: Pulls,
    entropy: Tensor | None,
    squared: Tensor | None,
    place: int,
) -> Tensor:
    """What each probability is multiplied by, `level [tokens]` at the least, in place of scores."""
    if grads.entropy is not None and entropy is not None:
        level -= grads.entropy * entropy[:, place]
    twice = None
    if grads.squared is not None and squared is not None:
        twice = 2 * grads.squared[:, None]
        level -= twice[:, 0] * squared
    if grads.entropy is not None:
        weight = scores.clamp_(min=LOWEST).mul_(-grads.entropy[:, None]).add_(level[:, None])
        return weight if twice is None else weight.addcmul_(probs, twice)
    if twice is None:
        return level[:, None]
    return torch.mul(probs, twice, out=scores).add_(level[:, None])


class WeightGradient:
    """The sum of a weight's gradients, in float32 or wider."""

    def __init__(self, weight: Tensor) -> None:
        self.dtype = weight.dtype
        self.sum = torch.zeros_like(weight, dtype=wide_of(weight))

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add `grad.T @ hidden` for `grad [tokens, out]` and `hidden [tokens, in]`."""
        if self.sum.dtype == self.dtype:
            self.sum.addmm_(grad.t(), hidden)
            return
        for first in range(0, len(self.sum), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            self.sum[rows] += grad[:, rows].t() @ hidden

    def total(self) -> Tensor:
        """It, in the weight's dtype."""
        return self.sum.to(self.dtype)
