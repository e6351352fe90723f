"""Attention over sequences that lie end to end, without masks: what is computed, and by what.

A sequence is a run of queries on a run of keys. `FlashSequences` computes them by torch's
`varlen_attn` (Dao, "FlashAttention-2", arXiv:2307.08691), `PlainSequences` a block of queries at a
time by matrix products, on any device and dtype, and with soft caps. Both give the log of the
softmax's sum beside the output, and take both for the backward pass. `attends_by` says which it
is, or that FlexAttention computes the whole layout. This file knows no layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlflow.batch import to_device
from rlflow.modelfiles.kernels.attention import (
    FLASH_CAPABILITY,
    AttentionAsked,
    AttentionBy,
    attention_choice,
)

# Scores that are worked on at a time where no kernel does it, of all heads.
SCORES_AT_ONCE = 1 << 24
FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Runs of queries on runs of keys, none of them empty.

    Run i has the queries from `q_bounds[i]` to `q_bounds[i + 1]`, keys likewise; int64
    `[runs + 1]`, and int32 as `q_starts` and `k_starts` on the device.
    """

    q_bounds: NDArray[np.int64]
    k_bounds: NDArray[np.int64]
    q_starts: Tensor
    k_starts: Tensor

    @property
    def longest_q(self) -> int:
        """Queries of the longest run."""
        return int(np.diff(self.q_bounds).max(initial=0))

    @property
    def longest_k(self) -> int:
        """Keys of the longest run."""
        return int(np.diff(self.k_bounds).max(initial=0))


def sequences(
    q_lengths: NDArray[np.int64], k_lengths: NDArray[np.int64], device: torch.device
) -> Sequences:
    """Runs of such lengths, one after the other."""
    bounds = [np.concatenate([[0], np.cumsum(each)]) for each in (q_lengths, k_lengths)]
    starts = [to_device(torch.from_numpy(each.astype(np.int32)), device) for each in bounds]
    return Sequences(q_bounds=bounds[0], k_bounds=bounds[1], q_starts=starts[0], k_starts=starts[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """Which keys of its run a query sees, and how scores are made of products.

    Runs end together: where `causal`, the last query sees all keys, the one before it all but the
    last; with a `window`, of those only the last so many. Scores are `scale * q k`, bounded by
    `softcap * tanh(score / softcap)`.
    """

    scale: float
    causal: bool
    window: int | None = None
    softcap: float | None = None


class SequenceAttention(Protocol):
    """A way of computing attention over sequences."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Sequences, seen: Visible
    ) -> tuple[Tensor, Tensor]:
        """Output like `q [tokens, heads, size]`, and log-sums `[heads, tokens]`, float32 or wider.

        `k` and `v` are `[keys, kv_heads, size]`.
        """

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sums: Tensor,
        runs: Sequences,
        seen: Visible,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v by these keys, where all keys gave `output` and `log_sums`."""


class FlashSequences:
    """By `torch.nn.attention.varlen`, on CUDA devices in bfloat16 and float16.

    A window of (-1, 0) is what makes it causal, or `is_causal` where that exists; `enable_gqa`,
    where it exists, allows fewer heads of keys. The backward is that of its operator, for it gives
    the log-sums no gradient and takes no other output than its own.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Sequences, seen: Visible
    ) -> tuple[Tensor, Tensor]:
        """See `SequenceAttention`."""
        from torch.nn.attention.varlen import varlen_attn

        output, log_sums = varlen_attn(
            q, k, v, runs.q_starts, runs.k_starts, runs.longest_q, runs.longest_k,
            **kernel_options(seen, kernel_parameters(), grouped=q.shape[1] != k.shape[1]),
        )  # fmt: skip
        return output, log_sums

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sums: Tensor,
        runs: Sequences,
        seen: Visible,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SequenceAttention`."""
        left, right = flash_window(seen)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, output.contiguous(), log_sums.contiguous(),
            runs.q_starts, runs.k_starts, runs.longest_q, runs.longest_k, 0.0,
            (left, right) == (-1, 0), state, torch.empty(0, device=q.device), scale=seen.scale,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return grads


@cache
def kernel_parameters() -> frozenset[str]:
    """The names of the kernel's parameters, which differ between versions of torch."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def kernel_options(seen: Visible, names: frozenset[str], *, grouped: bool) -> dict[str, Any]:
    """What the kernel is told by name, where it has parameters of such names."""
    from torch.nn.attention.varlen import AuxRequest

    told = {
        "return_aux": AuxRequest(lse=True),
        "scale": seen.scale,
        "window_size": flash_window(seen),
        "is_causal": seen.causal,
        "enable_gqa": grouped,
    }
    return {name: value for name, value in told.items() if name in names}


def flash_window(seen: Visible) -> tuple[int, int]:
    """How many keys before and after its own place a query sees; -1 are all."""
    if not seen.causal:
        return (-1, -1)
    return (-1 if seen.window is None else seen.window - 1, 0)


def attends_by(q: Tensor, v: Tensor, seen: Visible) -> AttentionBy:
    """What computes attention of such queries and values, on their device."""
    return attention_choice(attention_asked(q, v, seen)).by


def attention_asked(q: Tensor, v: Tensor, seen: Visible) -> AttentionAsked:
    """What is asked of a device, and what it and this build of torch can.

    Where there is no CUDA at all a CUDA tensor is one that stands for another machine's.
    """
    return AttentionAsked(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        head=q.shape[-1],
        value=v.shape[-1],
        softcap=seen.softcap,
        window=seen.window,
        capability=capability_of(q.device),
        rocm=torch.version.hip is not None,
        compiles=compiles_kernels() or not torch.cuda.is_available(),
        knows_windows="window_size" in kernel_parameters(),
    )


def flash_fits(q: Tensor, v: Tensor, seen: Visible) -> bool:
    """Whether torch's kernel takes such queries and values, and can be told what they see."""
    return attends_by(q, v, seen) == "varlen"


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's, and of a device that is not here the least that is asked for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return FLASH_CAPABILITY
    return torch.cuda.get_device_capability(device)


@cache
def compiles_kernels() -> bool:
    """Whether Triton is there, which torch's wheels for GPUs need and those for CPUs do without."""
    return find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class _Scores:
    """A block of queries of one run: where they and their keys lie, and their scores."""

    q: slice
    k: slice
    scores: Tensor
    slope: Tensor | None


class PlainSequences:
    """By matrix products, scores of a few queries at a time: slow, and of any device and dtype.

    What a block holds, `SCORES_AT_ONCE` numbers of each kind or one query's, does not grow with
    the number of tokens; it is made again for the backward pass.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, runs: Sequences, seen: Visible
    ) -> tuple[Tensor, Tensor]:
        """See `SequenceAttention`."""
        wide = torch.promote_types(q.dtype, torch.float32)
        output = q.new_empty(*q.shape[:2], v.shape[-1])
        log_sums = q.new_empty(q.shape[1], len(q), dtype=wide)
        for block in self.blocks(q, k, runs, seen):
            level = block.scores.logsumexp(-1)
            log_sums[:, block.q] = level.flatten(0, 1)
            probs = block.scores.sub_(level[..., None]).exp_().to(v.dtype)
            output[block.q] = ungrouped(probs.flatten(1, 2) @ by_head(v[block.k]), q.shape[1])
        return output, log_sums

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        log_sums: Tensor,
        runs: Sequences,
        seen: Visible,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SequenceAttention`."""
        wide, heads = log_sums.dtype, q.shape[1]
        grad_q = torch.zeros_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for block in self.blocks(q, k, runs, seen):
            kv_heads, repeats, rows, _ = block.scores.shape
            level = log_sums[:, block.q].reshape(kv_heads, repeats, rows, 1)
            probs = block.scores.sub_(level).exp_()
            outer = grouped_queries(grad[block.q], kv_heads)
            inner = (outer * grouped_queries(output[block.q], kv_heads)).sum(-1, dtype=wide)
            grad_v[block.k] += token_major(probs.to(v.dtype).flatten(1, 2).mT @ outer)
            pulls = (outer @ by_head(v[block.k]).mT).to(wide).view_as(probs)
            pulls.sub_(inner.view(kv_heads, repeats, rows, 1)).mul_(probs)
            if block.slope is not None:
                pulls.mul_(block.slope)
            low = pulls.mul_(seen.scale).to(q.dtype).flatten(1, 2)
            grad_q[block.q] = ungrouped(low @ by_head(k[block.k]), heads)
            grad_k[block.k] += token_major(low.mT @ grouped_queries(q[block.q], kv_heads))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)

    def blocks(self, q: Tensor, k: Tensor, runs: Sequences, seen: Visible) -> Iterator[_Scores]:
        """Every run's queries in blocks; scores `[kv_heads, heads / kv_heads, queries, keys]`."""
        heads, kv_heads = q.shape[1], k.shape[1]
        for run in range(len(runs.q_bounds) - 1):
            q_start, q_stop = runs.q_bounds[run : run + 2].tolist()
            k_start, k_stop = runs.k_bounds[run : run + 2].tolist()
            rows = max(1, SCORES_AT_ONCE // (heads * (k_stop - k_start)))
            keys = by_head(k[k_start:k_stop])
            for first in range(q_start, q_stop, rows):
                last = min(first + rows, q_stop)
                scores = grouped_queries(q[first:last], kv_heads) @ keys.mT
                scores = scores.to(torch.promote_types(q.dtype, torch.float32)).mul_(seen.scale)
                slope = None
                if seen.softcap is not None:
                    scores.div_(seen.softcap).tanh_()
                    slope = 1 - scores.square()
                    scores.mul_(seen.softcap)
                scores = scores.view(kv_heads, heads // kv_heads, last - first, -1)
                hide_unseen(scores, first - q_stop + k_stop - k_start, seen)
                yield _Scores(
                    slice(first, last), slice(k_start, k_stop), scores, slope_like(slope, scores)
                )


def slope_like(slope: Tensor | None, scores: Tensor) -> Tensor | None:
    """The slope of a soft cap in the shape of its scores."""
    return None if slope is None else slope.view_as(scores)


def hide_unseen(scores: Tensor, place: int, seen: Visible) -> None:
    """-inf where a query does not see a key; the first query stands at key number `place`."""
    if not seen.causal:
        return
    rows, keys = scores.shape[-2:]
    at = torch.arange(place, place + rows, device=scores.device)[:, None]
    key = torch.arange(keys, device=scores.device)
    unseen = key > at
    if seen.window is not None:
        unseen |= key <= at - seen.window
    scores.masked_fill_(unseen, float("-inf"))


def by_head(x: Tensor) -> Tensor:
    """Keys or values `[keys, kv_heads, size]` as `[kv_heads, keys, size]`."""
    return x.transpose(0, 1)


def token_major(x: Tensor) -> Tensor:
    """The inverse of `by_head`."""
    return x.transpose(0, 1)


def grouped_queries(x: Tensor, kv_heads: int) -> Tensor:
    """Queries `[rows, heads, size]` as `[kv_heads, heads / kv_heads * rows, size]`."""
    rows, heads, size = x.shape
    split = x.view(rows, kv_heads, heads // kv_heads, size)
    return split.permute(1, 2, 0, 3).reshape(kv_heads, -1, size)


def ungrouped(x: Tensor, heads: int) -> Tensor:
    """The inverse of `grouped_queries`."""
    kv_heads, _, size = x.shape
    split = x.view(kv_heads, heads // kv_heads, -1, size)
    return split.permute(2, 0, 1, 3).reshape(-1, heads, size)
