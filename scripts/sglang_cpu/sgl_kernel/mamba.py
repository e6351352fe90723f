"""Layers that carry states from token to token in plain torch: short convolutions, delta rules.

A state lies in a slot of a pool, is read where a sequence goes on and written where it ends. The
names and signatures are those that SGLang calls. This file knows no attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor | None,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any = None,
    **more: Any,
) -> Tensor:
    """A convolution over each of the sequences of `x [channels, tokens]`, which lie in a row.

    `weight [channels, width]`; of each sequence the last inputs go to its slot of `conv_states
    [slots, channels, width - 1]`, where those of one that goes on are.
    """
    refuse_more(more)
    starts, slots = query_start_loc.tolist(), cache_indices.tolist()
    goes_on = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    made = torch.empty_like(x)
    for row, slot in enumerate(slots):
        begin, end = starts[row : row + 2]
        held = conv_states[slot]
        before = (held if goes_on[row] else torch.zeros_like(held)).to(x.dtype)
        window = torch.cat([before, x[:, begin:end]], 1)
        made[:, begin:end] = convolved(window[None], weight, bias, activation)[0]
        held.copy_(window[:, window.shape[1] - held.shape[1] :])
    return made


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """The same for the next input of each sequence, `x [rows, channels]`."""
    refuse_more(more)
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices.long()
    window = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], 2)
    conv_states[slots] = window[:, :, 1:].to(conv_states.dtype)
    return convolved(window, weight, bias, activation)[:, :, 0]


def convolved(window: Tensor, weight: Tensor, bias: Tensor | None, activation: Any) -> Tensor:
    """A convolution of each channel of `window [rows, channels, width - 1 + tokens]` with its own.

    `[rows, channels, tokens]`.
    """
    made = F.conv1d(window, weight[:, None], bias, groups=len(weight))
    return F.silu(made) if activation in {"silu", "swish", True} else made


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithms of what states keep, and how much is written: float32 `[1, rows, heads]`."""
    kept = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return kept[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None, None]:
    """The gated delta rule over sequences that lie in a row, `v [1, tokens, heads, size]`.

    Their states, in slots `[slots, heads, value size, key size]`, are read and written.
    """
    del head_first
    refuse_more(more)
    starts = cu_seqlens.tolist()
    slots = range(len(starts) - 1) if initial_state_indices is None else initial_state_indices
    q, k = normed(q[0], k[0], v.shape[2], norm=use_qk_l2norm_in_kernel)
    made = torch.empty_like(v[0])
    for row, slot in enumerate([int(slot) for slot in slots]):
        state = initial_state[slot].float()
        for at in range(starts[row], starts[row + 1]):
            one = (x[at][None] for x in (q, k, v[0].float(), g[0].float(), beta[0].float()))
            found, states = delta_step(*one, state[None])
            made[at], state = found[0].to(v.dtype), states[0]
        initial_state[slot] = state.to(initial_state.dtype)
    return made[None], None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
    **more: Any,
) -> Tensor:
    """One step of each sequence, `v [1, rows, heads, size]`, with gates that are made here."""
    del softplus_beta, softplus_threshold, cu_seqlens
    refuse_more(more)
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    q, k = normed(q[0], k[0], v.shape[2], norm=use_qk_l2norm_in_kernel)
    state = initial_state_source[slots].float()
    made, state = delta_step(q, k, v[0].float(), g[0], beta[0], state)
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return made.to(v.dtype)[None]


def normed(q: Tensor, k: Tensor, heads: int, *, norm: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys in float32, for as many heads as values have; queries are scaled."""
    made = []
    for each in (q.float(), k.float()):
        length = each.square().sum(-1, keepdim=True) + EPSILON if norm else torch.ones(())
        made.append((each * length.rsqrt()).repeat_interleave(heads // each.shape[-2], -2))
    return made[0] * q.shape[-1] ** -0.5, made[1]


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of the gated delta rule (Yang et al. 2024, arXiv:2412.06464, equation 10).

    `q`, `k`, `v` are `[rows, heads, size]`, gates `[rows, heads]`, states `[rows, heads, value
    size, key size]`. What a state tells of a key is forgotten by `beta`, and the value written.
    """
    state = state * g.exp()[..., None, None]
    told = (state @ k[..., None])[..., 0]
    change = (v - told) * beta[..., None]
    state = state + change[..., None] * k[..., None, :]
    return (state @ q[..., None])[..., 0], state


def refuse_more(more: dict[str, Any]) -> None:
    """Refuse what is asked for beyond what is written here."""
    asked = sorted(name for name, value in more.items() if value is not None and value is not False)
    if asked:
        raise RuntimeError(f"not on this CPU: {', '.join(asked)}")
