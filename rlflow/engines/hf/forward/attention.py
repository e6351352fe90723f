"""Attention over packed tokens, reached from unmodified Hugging Face models.

`register_attention()` adds an attention implementation named "rlflow" to transformers. While a
model runs under `attending(state)`, that state receives the queries, keys and values of each layer:
`PackedAttention` for whole rows, with gradient; those for new tokens on a cache are in
`generate.attention`. Tensors are token-major: queries `[tokens, heads, size]`, keys and values
`[tokens, kv_heads, size]`. This file knows neither whole models nor losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlflow.engines.hf.forward.packed import Block, PackedLayout
from rlflow.engines.hf.forward.spans import attend_spans, once
from rlflow.engines.hf.generate.cache import States
from rlflow.errors import Finding, RunError
from rlflow.modelfiles.families import cannot_be_packed

NAME = "rlflow"
# Above this many scores a block goes to the kernel that does not keep them.
EAGER_SCORES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a layer asks of attention beyond the plain product.

    `softcap` bounds scores by cap * tanh(score / cap); `window` lets a token see itself and
    the window - 1 tokens before it; `sinks [heads]` are scores that take probability away.
    """

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


class AttentionState(Protocol):
    """What receives a layer's queries, keys and values."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """The attention output `[tokens, heads, size]`."""


class PromptCache(Protocol):
    """What keeps keys and values of prompts."""

    def fill(self, layer: int, parts: tuple[Tensor, ...], layout: PackedLayout) -> None:
        """Keep a layer's keys and values, of all flat tokens.

        Latents are alone: values are the first columns of what keys are.
        """

    def fill_states(self, layer: int, states: States) -> None:
        """Keep what a layer carries from the ends of all prompts, a line each."""


_current: ContextVar[AttentionState | None] = ContextVar("rlflow_attention", default=None)


@contextmanager
def attending(state: AttentionState) -> Iterator[None]:
    """Send the attention of every model called within, in this thread, to `state`."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


def current_state() -> AttentionState:
    """The state of the call in progress; RunError where there is none."""
    state = _current.get()
    if state is None:
        raise RunError(
            Finding(
                code="E512",
                what="a model loaded by rlflow was called directly",
                fix="call it through TorchModel.logits, which knows where the rows lie",
            )
        )
    return state


def packed_tokens() -> int | None:
    """Tokens of the pass in progress, of whole rows that no cache keeps; None in any other."""
    state = _current.get()
    if isinstance(state, PackedAttention) and state.cache is None:
        return len(state.layout.tokens)
    return None


def register_attention() -> None:
    """Make the implementation known to transformers; repeating it changes nothing.

    It has no mask of its own there, so transformers makes none: the layout says who sees whom.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention_forward)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    `[1, heads, tokens, size]` to `[1, tokens, heads, size]`; raises RunError for what it cannot do.
    """
    if position_bias is not None:
        raise RunError(
            cannot_be_packed(type(module).__name__, "cannot be packed", "biases by position")
        )
    traits = Traits(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
        sinks=s_aux,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (part.transpose(1, 2)[0] for part in (query, key, value))
    state, latent = current_state(), getattr(module, "latent_projection", None)
    if latent is None or isinstance(state, PackedAttention):
        return state.attend(layer, q, k, v, traits)[None], None
    return latent.widened(state.attend(layer, latent.absorbed(q), k, v, traits))[None], None


class PackedAttention:
    """Attention of whole rows in a layout; fills `cache` with the keys and values, if given.

    Where keys and values are made of `latents` of a layer, these are what the cache gets. `runs`
    are those of `mixers.states`, once they were asked for; `routing` is what routers of experts
    follow in the same pass, None for nothing; so are `pictures` of prompts.
    """

    def __init__(
        self, layout: PackedLayout, cache: PromptCache | None = None, routing: object = None
    ) -> None:
        self.layout = layout
        self.cache = cache
        self.routing = routing
        self.pictures: Any = None
        self.latents: dict[int, Tensor] = {}
        self.runs: Any = None
        self.biases: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, traits: Traits) -> Tensor:
        """The attention output of every flat token."""
        if self.cache is not None:
            latent = self.latents.pop(layer, None)
            self.cache.fill(layer, (k, v) if latent is None else (latent,), self.layout)
        window = traits.window
        if window is not None and window >= self.layout.longest:
            window = None
        if self.layout.spans is not None:
            return attend_spans(
                q, k, v, self.layout.spans, scale=traits.scaling, window=window,
                softcap=traits.softcap, sinks=traits.sinks,
            )  # fmt: skip
        plain = traits.softcap is None and traits.sinks is None
        blocks, slots = self.layout.blocks, self.layout.slots
        if plain and window is None and len(blocks) == 1 and eager(blocks[0], q.shape[1]):
            return self.attend_square(q, k, v, traits.scaling)
        parts = []
        for block in blocks:
            queries, keys, values = (
                spread(q, block.q_index, block.size),
                spread(k, block.kv_index, block.size),
                spread(v, block.kv_index, block.size),
            )
            mask = block.mask if window is None else seen_within(block, window)
            parts.append(block_attention(queries, keys, values, mask, traits).flatten(0, 1))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined if slots is None else joined.index_select(0, slots)

    def attend_square(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The same for one small square block, with a backward pass of its own."""
        block = self.layout.blocks[0]
        bias = self.bias(q.shape[1], k.shape[1], q.dtype)
        output: Tensor = SquareAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, bias, block.size, block.q_index, self.layout.slots, self.layout.real, scaling
        )
        return output

    def bias(self, heads: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add, `[size * kv_heads, heads / kv_heads * width, width]`."""
        key = (heads, dtype, kv_heads)
        if key not in self.biases:
            block = self.layout.blocks[0]
            shape = (block.size, heads, block.q_len, block.kv_len)
            with torch.inference_mode(False):
                bias = torch.zeros(block.mask.shape, dtype=dtype, device=block.mask.device)
                bias.masked_fill_(~block.mask, float("-inf"))
                whole = bias[:, None].expand(shape)
                self.biases[key] = whole.reshape(block.size * kv_heads, -1, block.kv_len)
        return self.biases[key]


def eager(block: Block, heads: int) -> bool:
    """Whether a block is small enough to keep its scores."""
    return block.square and block.size * heads * block.q_len * block.kv_len <= EAGER_SCORES


def seen_within(block: Block, window: int) -> Tensor:
    """What is seen of keys no further back than the window, bool `[size, q_len, kv_len]`."""
    seen = block.q_positions[:, :, None] - block.kv_positions[:, None, :] < window
    seen &= block.mask
    return seen if block.together is None else seen | block.together


def spread(x: Tensor, index: Tensor | None, size: int) -> Tensor:
    """Flat tokens to a block's places, `[size, length, heads, head_size]`."""
    places = x if index is None else x.index_select(0, index)
    return places.reshape(size, -1, *x.shape[1:])


def block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, traits: Traits) -> Tensor:
    """Attention in one block, token-major in and out; `mask` bool `[size, q_len, kv_len]`."""
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    grouped = query.shape[1] != key.shape[1]
    if traits.softcap is None and traits.sinks is None:
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask[:, None],
            scale=traits.scaling,
            enable_gqa=grouped,
        )
        return output.transpose(1, 2)
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
    scores = score_traits((query @ key.transpose(-1, -2)) * traits.scaling, traits)
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return (probabilities(scores, traits) @ value).transpose(1, 2)


def score_traits(scores: Tensor, traits: Traits) -> Tensor:
    """Bound the scores by the soft cap (Gemma 2 report, arXiv:2408.00118, section 2)."""
    if traits.softcap is None:
        return scores
    return torch.tanh(scores / traits.softcap) * traits.softcap


def probabilities(scores: Tensor, traits: Traits) -> Tensor:
    """Softmax of `[size, heads, q_len, kv_len]`; a sink is one more key without a value."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if traits.sinks is None:
        return wide.softmax(-1).to(scores.dtype)
    sinks = traits.sinks.to(wide.dtype).view(1, -1, 1, 1).expand(*wide.shape[:-1], 1)
    return torch.cat([wide, sinks], -1).softmax(-1)[..., :-1].to(scores.dtype)


class SquareAttention(torch.autograd.Function):
    """Attention in one padded square with saved probabilities.

    The backward pass gathers instead of scattering, for every flat token has one place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        size: int,
        index: Tensor | None,
        slots: Tensor | None,
        real: int,
        scaling: float,
    ) -> Tensor:
        """Flat `q [tokens, heads, head_size]` and `k`, `v [tokens, kv_heads, head_size]`."""
        kv_heads = k.shape[1]
        queries, keys, values = (to_heads(x, index, size, kv_heads) for x in (q, k, v))

        def attended() -> tuple[Tensor, Tensor]:
            scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scaling)
            probs = scores.softmax(-1)
            mixed = torch.bmm(probs, values)
            return from_heads(mixed, size, kv_heads, q.shape[1], slots), probs

        output, probs = once(attended)
        ctx.save_for_backward(queries, keys, values, probs, slots)
        ctx.geometry = (size, kv_heads, q.shape[1], real, scaling)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        queries, keys, values, probs, slots = ctx.saved_tensors
        size, kv_heads, heads, real, scaling = ctx.geometry
        if slots is not None:
            places = grad.new_zeros(size * probs.shape[2], *grad.shape[1:])
            grad = places.index_copy_(0, slots[:real], grad[:real])
        outer = to_heads(grad, None, size, kv_heads)
        grad_values = torch.bmm(probs.transpose(1, 2), outer)
        grad_probs = torch.bmm(outer, values.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
        none = queries.new_empty(())
        grad_queries = torch.baddbmm(none, grad_scores, keys, beta=0, alpha=scaling)
        grad_keys = torch.baddbmm(none, grad_scores.transpose(1, 2), queries, beta=0, alpha=scaling)
        grads = (
            from_heads(grad_queries, size, kv_heads, heads, slots),
            from_heads(grad_keys, size, kv_heads, kv_heads, slots),
            from_heads(grad_values, size, kv_heads, kv_heads, slots),
        )
        for filled in grads:
            filled[real:] = 0
        return *grads, *(None,) * 6


def to_heads(x: Tensor, index: Tensor | None, size: int, kv_heads: int) -> Tensor:
    """Flat tokens to `[size * kv_heads, repeats * width, head_size]`, contiguous."""
    places = spread(x, index, size)
    width, heads, head_size = places.shape[1:]
    split = places.view(size, width, kv_heads, heads // kv_heads, head_size)
    return split.permute(0, 2, 3, 1, 4).reshape(size * kv_heads, -1, head_size)


def from_heads(x: Tensor, size: int, kv_heads: int, heads: int, slots: Tensor | None) -> Tensor:
    """The inverse of `to_heads`: flat tokens `[tokens, heads, head_size]`."""
    split = x.view(size, kv_heads, heads // kv_heads, -1, x.shape[-1])
    places = split.permute(0, 3, 1, 2, 4).reshape(-1, heads, x.shape[-1])
    return places if slots is None else places.index_select(0, slots)
