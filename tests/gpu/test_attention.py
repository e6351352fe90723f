"""Part A further: attention over sequences and distributions in chunks, against float64 on the CPU.

The kernel that a device takes is compared with plain products, in outputs and all gradients, with
and without windows, sinks and soft caps; what a forward and a backward hold is counted by the
device. A GPU takes FlexAttention for soft caps and float32, which is compiled there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlflow.engines.hf.forward.attention import PackedAttention, Traits
from rlflow.engines.hf.forward.chunks import ChunkedScores
from rlflow.engines.hf.forward.head_kernel.rows import kernels_fit
from rlflow.engines.hf.forward.packed import pack
from rlflow.engines.hf.forward.sequences import Visible, attends_by
from rlflow.engines.hf.forward.shares import Projection, WantedNumbers
from rlflow.modelfiles.chunks import CHUNK_BYTES, chunk_bytes
from tests.gpu.test_compute import apart, batch_of

pytestmark = [pytest.mark.torch]

HEADS, KV_HEADS = 8, 2
# Products and parts are rounded to 8 bits of a number, sums are not.
BOUND = 2e-2


def attended(
    dtype: Any, device: Any, size: Any, sunk: bool, window: int | None, softcap: float | None
) -> Any:
    """Outputs and gradients of q, k, v and sinks, float64 on the CPU; equal numbers everywhere."""
    groups, n, prompt, response, width = size
    batch = batch_of(50, groups=groups, n=n, prompt=prompt, response=response)
    layout = pack(batch["prompt_tokens"], batch["response_tokens"], device, dense=False)
    made = torch.Generator().manual_seed(2)
    shapes = [(layout.real, heads, width) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    drawn = [torch.randn(shape, generator=made).bfloat16() for shape in shapes]
    q, k, v, weight = (x.to(device, dtype).requires_grad_() for x in drawn)
    sinks = torch.linspace(-1, 1, HEADS).to(device, dtype).requires_grad_() if sunk else None
    traits = Traits(scaling=width**-0.5, window=window, softcap=softcap, sinks=sinks)
    output = PackedAttention(layout).attend(0, q, k, v, traits)
    inputs = [q, k, v, *([sinks] if sinks is not None else [])]
    grads = torch.autograd.grad(output, inputs, weight.detach())
    seen = Visible(scale=traits.scaling, causal=True, window=window, softcap=softcap)
    by = "varlen" if dtype == torch.bfloat16 and softcap is None else "flex"
    assert attends_by(q, v, seen) == ("masks" if device.type == "cpu" else by)
    return [x.detach().double().cpu() for x in (output, *grads)]


@pytest.mark.parametrize("window", [None, 7, 600])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sunk", [False, True])
def test_attention_without_masks_is_that_of_float64(
    device: Any, big: bool, window: int | None, sunk: bool, softcap: float | None
) -> None:
    size = (3, 4, 700, 500, 64) if big else (3, 4, 20, 15, 16)
    expected = attended(torch.float64, torch.device("cpu"), size, sunk, window, softcap)
    for dtype in (torch.bfloat16, torch.float32):
        found = attended(dtype, device, size, sunk, window, softcap)
        bound = BOUND if dtype == torch.bfloat16 else 1e-5
        for one, other in zip(expected, found, strict=True):
            assert apart(one, other) < bound


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_long_row_takes_memory_for_its_tokens(gpu: Any, softcap: float | None) -> None:
    """32,768 tokens: a mask alone would be 1.07 GB; a tensor of them is 32 MB."""
    batch = batch_of(50, groups=1, n=2, prompt=16_384, response=16_384)
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    layout = pack(batch["prompt_tokens"], batch["response_tokens"], gpu)
    q, k, v = (
        torch.randn(layout.real, heads, 64, dtype=torch.bfloat16, device=gpu, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    traits = Traits(scaling=0.125, softcap=softcap)
    PackedAttention(layout).attend(0, q, k, v, traits).sum().backward()
    one = layout.real * HEADS * 64 * 2
    assert torch.cuda.max_memory_allocated(gpu) - before < 20 * one < 2**30


def test_flex_attention_is_compiled_once_for_all_numbers_of_tokens(gpu: Any) -> None:
    """And for all windows: of micro-batches of new sizes none waits for a compiler."""
    from torch._dynamo.utils import counters

    graphs = []
    for prompt, window in ((300, None), (421, 64), (977, None), (1500, 200)):
        batch = batch_of(50, groups=2, n=3, prompt=prompt, response=200)
        layout = pack(batch["prompt_tokens"], batch["response_tokens"], gpu)
        q, k, v = (
            torch.randn(
                layout.real, heads, 64, dtype=torch.bfloat16, device=gpu, requires_grad=True
            )
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        traits = Traits(scaling=0.125, softcap=50.0, window=window)
        PackedAttention(layout).attend(0, q, k, v, traits).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 1 == len(set(graphs))


def scored(dtype: Any, device: Any, size: Any, limit: int, cap: float | None) -> Any:
    """Log-probs, entropies and the gradients of hidden states and weight.

    On a GPU by Triton's kernels, but in float64.
    """
    tokens, width, vocabulary = size
    made = torch.Generator().manual_seed(4)
    hidden = torch.randn(tokens, width, generator=made).bfloat16()
    weight = (torch.randn(vocabulary, width, generator=made) / width**0.5).bfloat16()
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    chosen = torch.randint(vocabulary, (tokens,), generator=made).to(device)
    wanted = WantedNumbers(temperatures=(0.8,), limit=limit, entropy=True)
    form = Projection(size=vocabulary, cap=cap)
    by_kernels = device.type == "cuda" and dtype != torch.float64
    assert by_kernels == kernels_fit(hidden, wanted, chosen=False, biased=False)
    made = ChunkedScores.apply(hidden, weight, None, chosen, None, wanted, form)[:2]  # type: ignore[no-untyped-call]
    grads = torch.autograd.grad((made[0] - 0.3 * made[1]).sum(), (hidden, weight))
    return [x.detach().double().cpu() for x in (*made, *grads)]


@pytest.mark.parametrize("cap", [None, 3.0])
def test_chunks_of_distributions_are_those_of_float64(
    device: Any, big: bool, cap: float | None
) -> None:
    size = (600, 128, 20_000) if big else (60, 16, 200)
    limit = chunk_bytes(size[0] / 7, size[2], 2)
    expected = scored(torch.float64, torch.device("cpu"), size, limit, cap)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, BOUND)):
        for one, other in zip(expected, scored(dtype, device, size, limit, cap), strict=True):
            assert apart(one, other) < bound


def test_a_chunk_holds_what_the_plan_counts(gpu: Any) -> None:
    """16,384 tokens of 151,936 logits would be 10 GB in float32; a chunk and gradients are held."""
    tokens, width, vocabulary = 16_384, 1536, 151_936
    made = [
        torch.randn(rows, width, dtype=torch.bfloat16, device=gpu) for rows in (tokens, vocabulary)
    ]
    hidden, weight = (x.requires_grad_() for x in made)
    chosen = torch.randint(vocabulary, (tokens,), device=gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    wanted = WantedNumbers(temperatures=(1.0,), limit=CHUNK_BYTES, entropy=True)
    form = Projection(size=vocabulary)
    found = ChunkedScores.apply(hidden, weight, None, chosen, None, wanted, form)  # type: ignore[no-untyped-call]
    (found[0].sum() + found[1].sum()).backward()
    gradient = vocabulary * width * (2 + 4) + 2 * tokens * width * 2
    most = torch.cuda.max_memory_allocated(gpu) - before
    assert most < gradient + chunk_bytes(tokens, vocabulary, 2) + 2**28
