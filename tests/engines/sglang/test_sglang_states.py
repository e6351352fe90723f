"""What stands for SGLang's kernels of layers with states and of latent attention, on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as reference

pytestmark = pytest.mark.torch

SIZES = [5, 1, 3]
SLOTS = torch.tensor([4, 0, 2])
STARTS = torch.tensor([0, 5, 6, 9])


def cut(tensor):
    """The tokens of each sequence, of all in a row along the first dimension."""
    return tensor.split(SIZES)


def test_a_convolution_goes_on_where_a_sequence_has_stopped(kernels):
    torch.manual_seed(0)
    channels, width = 6, 4
    whole = [torch.randn(size + 4, channels) for size in SIZES]
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    states = torch.randn(5, channels, width - 1)
    given = torch.cat([row[: size + 1] for row, size in zip(whole, SIZES, strict=True)])
    starts = torch.tensor([0, *[size + 1 for size in SIZES]]).cumsum(0)
    expected = [
        F.silu(F.conv1d(F.pad(row.T, (width - 1, 0))[None], weight[:, None], bias, groups=channels))
        for row in whole
    ]

    none = torch.tensor([False] * 3)
    first = kernels.mamba.causal_conv1d_fn_cpu(
        given.T, weight, bias, "silu", states, none, SLOTS, starts
    )
    rest = torch.cat([row[size + 1 : size + 3] for row, size in zip(whole, SIZES, strict=True)])
    second = kernels.mamba.causal_conv1d_fn_cpu(
        rest.T, weight, bias, "silu", states, ~none, SLOTS, torch.tensor([0, 2, 4, 6])
    )
    last = kernels.mamba.causal_conv1d_update_cpu(
        torch.stack([row[-1] for row in whole]), states, weight, bias, "silu", SLOTS
    )

    pieces = zip(first.T.split([s + 1 for s in SIZES]), second.T.split(2), last, strict=True)
    for wanted, (begun, gone_on, ended) in zip(expected, pieces, strict=True):
        found = torch.cat([begun, gone_on, ended[None]])
        torch.testing.assert_close(found, wanted[0].T, rtol=1e-5, atol=1e-5)


def test_delta_rules_are_those_of_transformers_and_go_on(kernels):
    """Prefill in two parts and single steps, against one recurrence over all tokens."""
    torch.manual_seed(1)
    heads, keys, key, value = 4, 2, 8, 6
    tokens = sum(SIZES)
    q, k = torch.randn(2, 2 * tokens, keys, key)
    v, a, b = torch.randn(2 * tokens, heads, value), *torch.randn(2, 2 * tokens, heads)
    decay, bias = torch.rand(heads), torch.rand(heads)
    states = torch.zeros(5, heads, value, key)
    made = kernels.mamba.fused_gdn_gating_cpu(decay, a, b, bias)
    g, beta = (each[0] for each in made)

    def extended(part):
        return kernels.mamba.chunk_gated_delta_rule_cpu(
            *(each[part][None] for each in (q, k, v, g, beta)),
            initial_state=states,
            cu_seqlens=STARTS,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=SLOTS,
        )[0][0]

    first, second = extended(slice(0, tokens)), extended(slice(tokens, None))
    one = [each[:3][None] for each in (q, k, v)]
    third = kernels.fused_sigmoid_gating_delta_rule_update_cpu(
        decay, bias, *one, a[:3], b[:3], initial_state_source=states,
        initial_state_indices=SLOTS, cu_seqlens=torch.arange(4), use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0, softplus_threshold=20.0,
    )[0]  # fmt: skip

    kept = -decay.exp() * F.softplus(a + bias)
    for row, _ in enumerate(SIZES):
        ways = [
            torch.cat([cut(e[:tokens])[row], cut(e[tokens:])[row], e[row : row + 1]])[None]
            for e in (q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), v, kept, b.sigmoid())
        ]
        wanted, _ = reference.torch_recurrent_gated_delta_rule(
            *ways, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
        )
        found = torch.cat([cut(first)[row], cut(second)[row], third[row : row + 1]])
        torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-5)


def test_what_is_not_written_here_is_refused(kernels):
    with pytest.raises(RuntimeError, match="not on this CPU: intermediate_states_buffer"):
        kernels.fused_sigmoid_gating_delta_rule_update_cpu(
            *[torch.zeros(1)] * 7, torch.zeros(1), torch.zeros(1), None, True, 1.0, 20.0,
            intermediate_states_buffer=torch.zeros(1),
        )  # fmt: skip


def test_new_tokens_attend_with_their_own_keys_where_nothing_was_before(kernels):
    """Of latent attention they are of every head, and narrower values; the cache has others."""
    torch.manual_seed(2)
    tokens, heads, key, value = sum(SIZES), 3, 8, 5
    q, k = torch.randn(2, tokens, heads, key)
    v, made = torch.randn(tokens, heads, value), torch.empty(tokens, heads, value)
    cache = torch.full((32, 1, 7), float("nan"))
    lengths = torch.tensor(SIZES)
    kernels.extend_attention_cpu(
        q, k, v, made, cache, cache, 1.0, 1.0, torch.zeros(5, 9, dtype=torch.int32), SLOTS,
        lengths, lengths, STARTS[:-1], max(SIZES), 0.3, 0.0, False, 0, None, None, None, True,
    )  # fmt: skip

    for own in zip(*(cut(each) for each in (q, k, v, made)), strict=True):
        *ways, found = (each.transpose(0, 1) for each in own)
        wanted = F.scaled_dot_product_attention(*ways, is_causal=True, scale=0.3)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
