"""What single distributions say: greatest score, sum of exponentials, and what follows from them.

Ranks that share the vocabulary find the numbers of their part, and agree on those of the whole by
sums and greatest values of a number a token (Shoeybi et al., arXiv:1909.08053, section 3); the k
likeliest are chosen from k of every rank. This file knows neither hidden states nor gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.engines.hf.forward.token_scores import LOWEST

Top = tuple[Tensor, Tensor, Tensor]
"""Scores and ids `[tokens, k]` of the likeliest, and the log of the others' sum `[tokens]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """How hidden states become logits: `cap * tanh(scale * (W h + b) / cap)`, plain without a cap.

    This rank has the logits from `start` of `size` in all; `group` are the ranks that have the
    others, None where this one has all.
    """

    size: int
    start: int = 0
    group: dist.ProcessGroup | None = None
    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNumbers:
    """What is asked of each distribution, besides the log-prob of its token.

    Several temperatures are for log-probs and entropies only. `limit` bounds the bytes of a chunk.
    """

    temperatures: tuple[float, ...]
    limit: int
    entropy: bool = False
    squared: bool = False
    rest: bool = False
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """Of each token: its greatest score, and the log of the exponentials' sum relative to it."""

    greatest: Tensor
    log_sum: Tensor


@dataclass(frozen=True, slots=True)
class ChunkNumbers:
    """What one rank finds of a chunk's tokens, scores relative to the greatest that it has."""

    greatest: Tensor
    total: Tensor
    own: Tensor
    surprise: Tensor | None
    squared: Tensor | None
    at: Tensor | None
    rest: Tensor | None
    top: Top | None


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """The numbers of all tokens at one temperature."""

    sums: Sums
    log_probs: Tensor
    entropy: Tensor | None
    squared: Tensor | None
    at: Tensor | None
    rest: Tensor | None
    top: Top | None


def own_places(ids: Tensor, part: int, form: Projection) -> tuple[Tensor, Tensor | None]:
    """Where `ids` lie in this rank's part, 0 where they do not; bool where they do, None if all."""
    if form.group is None:
        return ids, None
    own = (ids >= form.start) & (ids < form.start + part)
    return (ids - form.start).masked_fill(~own, 0), own


def looked_up(scores: Tensor, ids: Tensor, form: Projection) -> Tensor:
    """Scores at `ids [tokens, k]`, 0 at those of other ranks."""
    place, own = own_places(ids, scores.shape[1], form)
    values = scores.gather(1, place)
    return values if own is None else values.masked_fill(~own, 0.0)


def without(scores: Tensor, ids: Tensor, form: Projection) -> Tensor:
    """The log of the sum of exponentials of all scores but those at `ids`, `[tokens]`."""
    place, own = own_places(ids, scores.shape[1], form)
    if own is None:
        return scores.scatter(1, place, -math.inf).logsumexp(-1)
    least = torch.where(own, -math.inf, math.inf).to(scores.dtype)
    return scores.scatter_reduce(1, place, least, "amin").logsumexp(-1)


def hide(scores: Tensor, ids: Tensor, form: Projection) -> Tensor:
    """Scores with -inf at `ids`, in place."""
    place, own = own_places(ids, scores.shape[1], form)
    if own is None:
        return scores.scatter_(1, place, -math.inf)
    least = torch.where(own, -math.inf, math.inf).to(scores.dtype)
    return scores.scatter_reduce_(1, place, least, "amin")


def chunk_numbers(
    scores: Tensor, tokens: Tensor, ids: Tensor | None, asked: WantedNumbers, form: Projection
) -> ChunkNumbers:
    """What this rank's `scores [tokens, part]` say; they are overwritten."""
    own = looked_up(scores, tokens[:, None], form)[:, 0]
    at = None if ids is None else looked_up(scores, ids, form)
    greatest = scores.amax(-1).clamp_(min=LOWEST)
    best = None
    if asked.top_k:
        best = scores.topk(min(asked.top_k, scores.shape[1]), -1)
    scores.sub_(greatest[:, None])
    rest = None
    if ids is not None and asked.rest:
        rest = without(scores, ids, form)
    top = None
    if best is not None:
        others = scores.scatter(1, best.indices, -math.inf).logsumexp(-1)
        top = (best.values, best.indices + form.start, others + greatest)
    powers = scores.exp()
    total = powers.sum(-1)
    squared = torch.linalg.vecdot(powers, powers) if asked.squared else None
    surprise = None
    if asked.entropy:
        surprise = powers.mul_(scores.clamp_(min=LOWEST)).sum(-1)
    return ChunkNumbers(greatest, total, own, surprise, squared, at, rest, top)


def token_numbers(
    chunks: list[ChunkNumbers], asked: WantedNumbers, form: Projection
) -> TokenNumbers:
    """The numbers of all tokens, of what every rank found in every chunk."""
    greatest, total, own = (
        torch.cat([getattr(one, name) for one in chunks]) for name in ("greatest", "total", "own")
    )
    surprise, squared, at, rest = (
        None if getattr(chunks[0], name) is None
        else torch.cat([getattr(one, name) for one in chunks])
        for name in ("surprise", "squared", "at", "rest")
    )  # fmt: skip
    tops = [one.top for one in chunks if one.top is not None]
    top: Top | None = None
    if tops:
        top = (
            torch.cat([values for values, _, _ in tops]),
            torch.cat([ids for _, ids, _ in tops]),
            torch.cat([others for _, _, others in tops]),
        )
    if form.group is not None:
        here = greatest
        greatest = over_ranks(here.clone(), form, dist.ReduceOp.MAX)
        less = here - greatest
        if surprise is not None:
            surprise = over_ranks(less.exp() * (surprise + less * total), form)
        if squared is not None:
            squared = over_ranks((2 * less).exp() * squared, form)
        total = over_ranks(less.exp() * total, form)
        own = over_ranks(own, form)
        at = None if at is None else over_ranks(at, form)
        rest = None if rest is None else sum_of_logs(rest + less, form)
        top = None if top is None else likeliest_of_all(*top, asked.top_k, form)
    log_sum = total.log()
    if top is not None:
        values, ids, others = top
        level = (greatest + log_sum)[:, None]
        top = values - level, ids, others - level[:, 0]
    return TokenNumbers(
        sums=Sums(greatest, log_sum),
        log_probs=own - greatest - log_sum,
        entropy=None if surprise is None else log_sum - surprise / total,
        squared=None if squared is None else squared / total.square(),
        at=None if at is None else at - greatest[:, None] - log_sum[:, None],
        rest=None if rest is None else rest - log_sum,
        top=top,
    )


def over_ranks(x: Tensor, form: Projection, by: Any = dist.ReduceOp.SUM) -> Tensor:
    """Add up `x` over the ranks that share the vocabulary, in place."""
    dist.all_reduce(x, by, group=form.group)
    return x


def sum_of_logs(x: Tensor, form: Projection) -> Tensor:
    """The log of the sum of the ranks' exponentials."""
    level = over_ranks(x.clone(), form, dist.ReduceOp.MAX).clamp_(min=LOWEST)
    return level + over_ranks((x - level).exp(), form).log()


def likeliest_of_all(values: Tensor, ids: Tensor, others: Tensor, k: int, form: Projection) -> Top:
    """The k best of what every rank says are its best, and the log-sum of all others."""
    missing = k - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=-math.inf).contiguous()
    ids = torch.nn.functional.pad(ids, (0, missing)).contiguous()
    ranks = dist.get_world_size(form.group)
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    all_ids = [torch.empty_like(ids) for _ in range(ranks)]
    all_others = [torch.empty_like(others) for _ in range(ranks)]
    dist.all_gather(all_values, values, group=form.group)
    dist.all_gather(all_ids, ids, group=form.group)
    dist.all_gather(all_others, others.contiguous(), group=form.group)
    candidates = torch.cat(all_values, -1)
    best = candidates.topk(k, -1)
    left = candidates.scatter(1, best.indices, -math.inf)
    left = torch.cat([left, torch.stack(all_others, -1)], -1).logsumexp(-1)
    return best.values, torch.cat(all_ids, -1).gather(1, best.indices), left
