"""Ring attention: keys and values go round the ranks, each adds what its own queries see of them.

Every rank has two chunks of the tokens; what it computes of each other's keys is merged by
log-sums, and the backward of a part alone, given the merged output and log-sums, is exactly its
share (`MergedAttention`), so keys and values go round once more with their gradients (Liu et al.,
"Ring Attention with Blockwise Transformers", arXiv:2310.01889, section 3). Messages of the next
keys are on their way while the present ones are computed with. This file knows no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.batch import to_device
from rlflow.engines.hf.context.cutting import TokenCut
from rlflow.engines.hf.forward.prefixes import Index
from rlflow.engines.hf.forward.sequences import SequenceAttention, Sequences, Visible, sequences
from rlflow.engines.hf.forward.spans import Spans, joined_parts, once, weight_of

At = slice | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRuns:
    """Runs of own queries, in the places `q`, on runs of another rank's keys, in the places `k`."""

    q: At
    k: At
    runs: Sequences
    causal: bool


Steps = tuple[tuple[PartRuns, ...], ...]


def ring_steps(spans: Spans, cut: TokenCut, rank: int) -> Steps:
    """What a rank computes with the keys of each: its own first, then as they come round.

    Every run of the layout on itself, as far as both ranks have tokens of it, and a group's rows
    on the prompt before them.
    """
    start, stop = spans.start, spans.start + spans.length
    rows = np.flatnonzero(spans.prefix_length)
    first = np.flatnonzero(np.diff(spans.prefix_start[rows], prepend=-1))
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    group = start[rows[first]], stop[rows[last]]
    before = spans.prefix_start[rows[first]]
    prompt = before, before + spans.prefix_length[rows[first]]
    found = []
    for step in range(cut.ranks):
        source = (rank - step) % cut.ranks
        # Of a rank before this one only the early chunk is before both of this one's, and of one
        # behind it both are before the late one.
        q_late, k_late = (
            (None, None) if not step else (None, False) if source < rank else (True, None)
        )
        own = cut.local(start, stop, rank, late=q_late), cut.local(start, stop, source, late=k_late)
        on_prompts = cut.local(*group, rank), cut.local(*prompt, source)
        runs = (_runs(*own, spans.device, causal=not step),
                _runs(*on_prompts, spans.device, causal=False))  # fmt: skip
        found.append(tuple(each for each in runs if each is not None))
    return tuple(found)


def _runs(q: Index, k: Index, device: torch.device, *, causal: bool) -> PartRuns | None:
    """Runs of queries on runs of keys, first places and lengths; without those that lack either."""
    there = np.flatnonzero((q[1] > 0) & (k[1] > 0))
    if not len(there):
        return None
    q, k = q[:, there], k[:, there]
    runs = sequences(q[1], k[1], device)
    places = (_at(each[0], each[1], device) for each in (q, k))
    return PartRuns(q=next(places), k=next(places), runs=runs, causal=causal)


def _at(start: Index, length: Index, device: torch.device) -> At:
    """Places of runs, one after the other: a slice where they are neighbours."""
    if (start[1:] == (start + length)[:-1]).all():
        return slice(int(start[0]), int(start[-1] + length[-1]))
    ends = np.cumsum(length)
    index = np.arange(int(ends[-1])) + np.repeat(start - (ends - length), length)
    return to_device(torch.from_numpy(index), device)


class Passing:
    """Something `[tokens, size]` on its way to the next rank of a ring, and that of the last one.

    An all-to-all of which all but two parts are empty.
    """

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        ranks, place = dist.get_world_size(group), dist.get_rank(group)
        going, coming = [0] * ranks, [0] * ranks
        going[(place + 1) % ranks] = coming[(place - 1) % ranks] = len(sent)
        self.sent = sent.contiguous()
        self.come = torch.empty_like(self.sent)
        self.work = dist.all_to_all_single(
            self.come, self.sent, coming, going, group=group, async_op=True
        )

    def arrived(self) -> Tensor:
        """What the rank before sent."""
        if self.work is not None:
            self.work.wait()
        return self.come


class RingAttention(torch.autograd.Function):
    """The attention output of own tokens on those of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        steps: Steps,
        seen: Visible,
        way: SequenceAttention,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """`q [tokens, heads, size]`, `k` and `v` `[tokens, kv_heads, size]`, `sinks [heads]`."""
        output, sums = once(lambda: attend_round(q, k, v, sinks, steps, seen, way, group))
        ctx.save_for_backward(q, k, v, sinks, output, sums)
        ctx.how = steps, seen, way, group
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and sinks."""
        q, k, v, sinks, output, sums = ctx.saved_tensors
        steps, seen, way, group = ctx.how
        wide = sums.dtype
        grad_q, pair = torch.zeros_like(q, dtype=wide), KeysAndValues(k, v)
        piece, owed = pair.joined(k, v), None
        for number, runs in enumerate(steps):
            coming = Passing(piece, group) if number + 1 < len(steps) else None
            keys, values = pair.split(piece)
            added = torch.zeros_like(piece, dtype=wide)
            added_k, added_v = pair.split(added)
            for each in runs:
                more = way.backward(
                    grad[each.q], q[each.q], keys[each.k], values[each.k], output[each.q],
                    sums[:, each.q], each.runs, replace(seen, causal=each.causal),
                )  # fmt: skip
                grad_q[each.q] += more[0]
                added_k[each.k] += more[1]
                added_v[each.k] += more[2]
            owed = Passing(added if owed is None else owed.arrived() + added, group)
            piece = piece if coming is None else coming.arrived()
        assert owed is not None
        grad_k, grad_v = pair.split(owed.arrived())
        grad_sinks = None
        if sinks is not None:
            inner = (grad * output).sum(-1, dtype=wide).t()
            probs = (sinks.to(wide)[:, None] - sums).exp()
            grad_sinks = -(probs * inner).sum(1).to(sinks.dtype)
        grads = grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks
        return *grads, *(None,) * 4


class KeysAndValues:
    """Keys and values as one tensor `[tokens, size]`, so that they travel in one message."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.shapes: Sequence[tuple[int, ...]] = (tuple(k.shape[1:]), tuple(v.shape[1:]))

    def joined(self, k: Tensor, v: Tensor) -> Tensor:
        """Both, side by side."""
        return torch.cat([k.flatten(1), v.flatten(1)], 1)

    def split(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Views of both."""
        sizes = [heads * size for heads, size in self.shapes]
        k, v = (part.view(len(part), *shape) for part, shape in
                zip(torch.split(piece, sizes, 1), self.shapes, strict=True))  # fmt: skip
        return k, v


def attend_round(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    steps: Steps,
    seen: Visible,
    way: SequenceAttention,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """The forward: output, and log-sums `[heads, tokens]`, -inf of what sees nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    output = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=wide)
    sums = q.new_full((q.shape[1], len(q)), float("-inf"), dtype=wide)
    pair = KeysAndValues(k, v)
    piece = pair.joined(k, v)
    for number, runs in enumerate(steps):
        coming = Passing(piece, group) if number + 1 < len(steps) else None
        keys, values = pair.split(piece)
        for each in runs:
            more = way.forward(
                q[each.q], keys[each.k], values[each.k], each.runs,
                replace(seen, causal=each.causal),
            )  # fmt: skip
            output[each.q], sums[:, each.q] = joined_parts(output[each.q], sums[:, each.q], *more)
        piece = piece if coming is None else coming.arrived()
    if sinks is not None:
        joined = torch.logaddexp(sums, sinks.to(wide)[:, None])
        output, sums = output * weight_of(sums, joined), joined
    return output.to(q.dtype), sums
