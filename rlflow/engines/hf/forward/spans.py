"""Attention of packed rows as sequences, for devices where a mask would be larger than the tokens.

Prompts stand first, then the own tokens of all rows. Every prompt and every row attends to itself,
causally; and the rows of a group, all together, attend to their prompt, which is there once. The
two are merged by their log-sums, or computed at once with a mask of blocks. This file knows no
kernel and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import to_device
from rlflow.engines.hf.forward.flex.attention import attend_flex
from rlflow.engines.hf.forward.flex.block_masks import block_mask, seen_keys
from rlflow.engines.hf.forward.prefixes import Index
from rlflow.engines.hf.forward.sequences import (
    FlashSequences,
    PlainSequences,
    SequenceAttention,
    Sequences,
    Visible,
    attends_by,
    sequences,
)
from rlflow.engines.hf.mixers.padded import PaddedValues

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class AttentionMemory:
    """What attention made in a forward, for the one that computes the same again.

    Torch keeps outputs of operators of its choice (`create_selective_checkpoint_contexts`). Here
    attention is several, the last of which writes into what the first has made; kept is what they
    make together, of which the bytes are known, and not what they pass on among each other.
    """

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, Tensor]] = []
        self.again: Iterator[tuple[Tensor, Tensor]] | None = None

    def once(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `make` returns, or has returned when it was called in its place before."""
        if self.again is not None:
            one, other = next(self.again)
        else:
            one, other = make()
            self.made.append((one.detach(), other.detach()))
        return one.detach(), other.detach()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Keep what attention makes in the block."""
        token = _memory.set(self)
        try:
            yield
        finally:
            _memory.reset(token)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Make nothing in the block: take what was kept, in the same order."""
        self.again = iter(self.made)
        with self.filling():
            yield


_memory: ContextVar[AttentionMemory | None] = ContextVar("rlflow_kept_attention", default=None)


def once(make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What `make` returns; within an `AttentionMemory` that tells, what it has returned before."""
    memory = _memory.get()
    return make() if memory is None else memory.once(make)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Which flat tokens attend to which: `prompts` of prompts, then those of rows by group.

    `own` are prompts and rows, each by itself; `prefixes` are each group's rows on its prompt,
    None where no row has tokens of its own. The other arrays, int64, say where each run of `own`
    starts, how long it is, and where the prompt before it lies, of length 0 for a prompt itself.
    """

    prompts: int
    own: Sequences
    prefixes: Sequences | None
    start: Index
    length: Index
    prefix_start: Index
    prefix_length: Index
    device: torch.device
    windows: dict[int, tuple[Sequences, Tensor]] = field(default_factory=dict)
    masks: dict[int | None, BlockMask] = field(default_factory=dict)

    def mask(self, window: int | None) -> BlockMask:
        """Which blocks of tokens see which, made once for all layers of a window, or of none."""
        if window not in self.masks:
            seen = seen_keys(self.start, self.length, self.prefix_start, self.prefix_length, window)
            with torch.inference_mode(False):
                self.masks[window] = block_mask(seen, self.device)
        return self.masks[window]

    def within(self, window: int) -> tuple[Sequences, Tensor]:
        """Runs on the keys that `window` lets them see, and int64 which flat tokens those are.

        How far a row sees into its prompt depends on the place in the row, so every row has a run
        of its own, on a copy of the keys: at most window - 1 tokens of its prompt.
        """
        if window not in self.windows:
            before = np.minimum(self.prefix_length, window - 1)
            runs = sequences(self.length, before + self.length, self.device)
            first = self.prefix_start + self.prefix_length - before
            pieces = np.stack([first, self.start], 1).reshape(-1)
            sizes = np.stack([before, self.length], 1).reshape(-1)
            ends = np.cumsum(sizes)
            index = np.arange(int(ends[-1])) + np.repeat(pieces - (ends - sizes), sizes)
            self.windows[window] = runs, to_device(torch.from_numpy(index), self.device)
        return self.windows[window]


class FlatRows(Protocol):
    """Prompts `[groups]` and rows `[rows]` in a flat sequence, int64; `packed` has them."""

    @property
    def group_start(self) -> Index:
        """Where prompts start."""

    @property
    def prompt_length(self) -> Index:
        """Their tokens."""

    @property
    def row_group(self) -> Index:
        """The prompt of each row."""

    @property
    def row_start(self) -> Index:
        """Where rows start."""

    @property
    def row_length(self) -> Index:
        """Their tokens."""


def spans(rows: FlatRows, device: torch.device) -> Spans:
    """The spans of prompts and rows, of which all prompts lie first, those with rows before."""
    prompt_length, prompt_start = rows.prompt_length, rows.group_start
    order, filled = np.argsort(prompt_start), rows.row_length > 0
    group, starts, sizes = (
        each[filled] for each in (rows.row_group, rows.row_start, rows.row_length)
    )
    none = np.zeros_like(prompt_length)
    length = np.concatenate([prompt_length[order], sizes])
    added = np.bincount(group, sizes, len(prompt_length)).astype(np.int64)[order]
    used = int((added > 0).sum())
    prefixes = None
    if used:
        prefixes = sequences(added[:used], prompt_length[order][:used], device)
    return Spans(
        prompts=int(prompt_length.sum()),
        own=sequences(length, length, device),
        prefixes=prefixes,
        start=np.concatenate([prompt_start[order], starts]),
        length=length,
        prefix_start=np.concatenate([none, prompt_start[group]]),
        prefix_length=np.concatenate([none, prompt_length[group]]),
        device=device,
    )


def attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention output `[tokens, heads, size]` of flat q, and k, v `[tokens, kv_heads, size]`.

    Values may be narrower than keys, and the output is as wide as they are.

    What torch's kernel does not take, such as a soft cap or float32, FlexAttention computes; what
    neither takes, plain products a block at a time, which are slower (`attention_choice`).
    """
    seen = Visible(scale=scale, causal=True, window=window, softcap=softcap)
    by = attends_by(q, v, seen)
    if by == "flex" and len(q):
        return attend_masked(q, k, v, sinks, spans, seen)
    way: SequenceAttention = FlashSequences() if by == "varlen" else PlainSequences()
    if by == "varlen" and v.shape[-1] < q.shape[-1]:
        way = PaddedValues(way)
    output: Tensor = MergedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, spans, seen, way
    )
    return output


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spans: Spans, seen: Visible
) -> Tensor:
    """The same by one kernel for all that a token sees; a sink is merged by its log-sum.

    Torch differentiates it, the log-sums too, and an `AttentionMemory` keeps nothing of it: where
    a backward computes a layer again, it computes this again.
    """
    output, sums = attend_flex(
        q, k, v, spans.mask(seen.window), scale=seen.scale, softcap=seen.softcap
    )
    if sinks is None:
        return output
    joined = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
    return (output * weight_of(sums, joined)).to(q.dtype)


class MergedAttention(torch.autograd.Function):
    """Attention to own tokens and to the prompt before them, each computed by itself, merged.

    With log-sums L1 and L2 of the two parts and L = log(exp L1 + exp L2), the output is
    exp(L1 - L) o1 + exp(L2 - L) o2. A sink is a part of log-sum s and output 0. In the backward
    pass a score s_ij with probability p_ij = exp(s_ij - L_i) has the gradient
    p_ij (do_i v_j - do_i o_i), in which the merged output and log-sum are all that is of other
    keys. So the backward of a part alone, given those in the place of its own, is exactly the
    part's share, without a gradient of the parts' log-sums; a sink's is -p do_i o_i.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        spans: Spans,
        seen: Visible,
        way: SequenceAttention,
    ) -> Tensor:
        """`sinks [heads]` may be None."""
        output, sums = once(lambda: attend_merged(q, k, v, sinks, spans, seen, way))
        ctx.save_for_backward(q, k, v, sinks, output, sums)
        ctx.spans, ctx.seen, ctx.way = spans, seen, way
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and sinks."""
        q, k, v, sinks, output, sums = ctx.saved_tensors
        spans, seen, way = ctx.spans, ctx.seen, ctx.way
        if seen.window is not None:
            runs, index = spans.within(seen.window)
            grad_q, *gathered = way.backward(grad, q, k[index], v[index], output, sums, runs, seen)
            grad_k, grad_v = (added_up(g, index, x) for g, x in zip(gathered, (k, v), strict=True))
        else:
            grad_q, grad_k, grad_v = way.backward(grad, q, k, v, output, sums, spans.own, seen)
            if spans.prefixes is not None:
                rows, known = slice(spans.prompts, None), slice(0, spans.prompts)
                more = way.backward(
                    grad[rows], q[rows], k[known], v[known], output[rows], sums[:, rows],
                    spans.prefixes, of_prompts(seen),
                )  # fmt: skip
                grad_q[rows] += more[0]
                grad_k[known] += more[1]
                grad_v[known] += more[2]
        grad_sinks = None
        if sinks is not None:
            inner = (grad * output).sum(-1, dtype=sums.dtype).t()
            probs = (sinks.to(sums.dtype)[:, None] - sums).exp()
            grad_sinks = -(probs * inner).sum(1).to(sinks.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None


def attend_merged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    spans: Spans,
    seen: Visible,
    way: SequenceAttention,
) -> tuple[Tensor, Tensor]:
    """The forward of `MergedAttention`: output, and log-sums `[heads, tokens]`."""
    if seen.window is not None:
        runs, index = spans.within(seen.window)
        output, sums = way.forward(q, k[index], v[index], runs, seen)
    else:
        output, sums = way.forward(q, k, v, spans.own, seen)
        if spans.prefixes is not None:
            rows, known = slice(spans.prompts, None), slice(0, spans.prompts)
            more = way.forward(q[rows], k[known], v[known], spans.prefixes, of_prompts(seen))
            output[rows], sums[:, rows] = joined_parts(output[rows], sums[:, rows], *more)
    if sinks is not None:
        joined = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        output = (output * weight_of(sums, joined)).to(q.dtype)
        sums = joined
    return output, sums


def of_prompts(seen: Visible) -> Visible:
    """How rows see the prompt before them: all of it."""
    return Visible(scale=seen.scale, causal=False, softcap=seen.softcap)


def joined_parts(
    output: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Two outputs `[tokens, heads, size]` with log-sums `[heads, tokens]` as one."""
    joined = torch.logaddexp(sums, other_sums)
    both = output * weight_of(sums, joined) + other * weight_of(other_sums, joined)
    return both.to(output.dtype), joined


def weight_of(sums: Tensor, joined: Tensor) -> Tensor:
    """What a part weighs in the whole, `[tokens, heads, 1]`."""
    return (sums - joined).exp().t()[..., None]


def added_up(grad: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Gradients of copies added up where they were taken from, in float32 or wider."""
    wide = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros_like(like, dtype=wide)
    return total.index_add_(0, index, grad.to(wide)).to(like.dtype)
