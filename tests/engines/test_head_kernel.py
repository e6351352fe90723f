"""Distributions by Triton's kernels, interpreted on the CPU: `make test-triton` has Triton.

Against float64, in outputs and gradients; with temperature, scale and soft cap, in vocabularies
that are no multiple of a block, and cut over ranks.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile

import pytest
import torch

from rlflow.engines.hf.forward import chunks, shares
from rlflow.engines.hf.forward.chunks import ChunkedScores
from rlflow.engines.hf.forward.head_kernel import rows
from rlflow.engines.hf.forward.head_kernel.rows import kernels_fit
from rlflow.engines.hf.forward.shares import Projection, WantedNumbers
from rlflow.modelfiles.chunks import chunk_bytes
from tests.conftest import ROOT

pytestmark = [pytest.mark.torch]
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are interpreted by make test-triton"
)

PLAIN = WantedNumbers(temperatures=(1.0,), limit=1 << 20, entropy=True)


@pytest.fixture
def by_kernels(monkeypatch):
    """Chunks on this CPU go by the kernels; in blocks that a vocabulary is no multiple of."""
    kernels = pytest.importorskip("rlflow.engines.hf.forward.head_kernel.kernels")
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(chunks, "kernels_fit", lambda hidden, *_, **__: hidden.dtype in rows.DTYPES)


def scored(dtype, asked, form, *, tokens=13, width=24, vocabulary=150, weigh=(1.0, -0.3)):
    """Log-probs, entropies and the gradients of hidden states and weight, in float64."""
    drawn = torch.Generator().manual_seed(4)
    hidden = (2 * torch.randn(tokens, width, generator=drawn)).bfloat16()
    weight = torch.randn(vocabulary, width, generator=drawn).bfloat16()
    part = slice(form.start, form.start + vocabulary)
    hidden, weight = hidden.to(dtype), weight[part.start : part.stop].to(dtype)
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    chosen = torch.randint(vocabulary, (tokens,), generator=drawn)
    made = ChunkedScores.apply(hidden, weight, None, chosen, None, asked, form)[:2]
    total = sum(
        w * (x * torch.arange(1, tokens + 1)[:, None]).sum()
        for w, x in zip(weigh, made, strict=True)
        if w and x is not None
    )
    grads = torch.autograd.grad(total, (hidden, weight))
    return [x.detach().double() for x in (*made, *grads) if x is not None]


@interpreted
@pytest.mark.parametrize("weigh", [(1.0, -0.3), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize(
    ("scale", "cap", "temperature"), [(1.0, None, 1.0), (0.25, None, 0.7), (1.0, 3.0, 1.3)]
)
def test_they_are_those_of_float64(scale, cap, temperature, weigh, by_kernels, monkeypatch):
    """And of torch's operators in bfloat16, which round logits and gradients in the same places."""
    form = Projection(size=150, scale=scale, cap=cap)
    limit = chunk_bytes(5, 150, 4)
    asked = WantedNumbers(temperatures=(temperature,), limit=limit, entropy=True)
    exact, single, half = (
        scored(dtype, asked, form, weigh=weigh)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    monkeypatch.undo()
    plain = scored(torch.bfloat16, asked, form, weigh=weigh)
    for expected, found, bound in ((exact, single, 1e-5), (plain, half, 2**-7)):
        for one, other in zip(expected, found, strict=True):
            assert (one - other).norm() <= bound * one.norm()


@interpreted
@pytest.mark.usefixtures("by_kernels")
def test_without_entropies_there_are_none():
    asked = WantedNumbers(temperatures=(0.7,), limit=1 << 20)
    form = Projection(size=150)
    expected, found = (
        scored(dtype, asked, form, weigh=(1.0, 0.0)) for dtype in (torch.float64, torch.float32)
    )
    assert 3 == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


@interpreted
@pytest.mark.usefixtures("by_kernels")
def test_logits_that_are_excluded_have_probability_0():
    """As of a vocabulary filled up with rows that no token has."""
    raw = torch.linspace(-3, 3, 150).repeat(2, 1)
    raw[:, 100:] = -math.inf
    raw[1, :100] = -2e4
    tokens, form = torch.tensor([7, 99]), Projection(size=150)
    found = rows.numbers_by_row(raw, tokens, PLAIN, form)
    made = shares.token_numbers([found], PLAIN, form)
    expected = torch.distributions.Categorical(logits=raw[:, :100].double())
    assert torch.allclose(made.log_probs.double(), expected.log_prob(tokens), atol=1e-5)
    assert torch.allclose(made.entropy.double(), expected.entropy(), atol=1e-5)
    ones = torch.ones(2)
    pulls = rows.RowPulls(
        level=made.sums.greatest + made.sums.log_sum,
        entropy=made.entropy,
        on_log_prob=ones,
        on_entropy=ones,
    )
    pulled = rows.pull_rows(raw.clone(), tokens, pulls, PLAIN, form)
    assert torch.isfinite(pulled).all()
    assert not pulled[:, 100:].any()


@interpreted
@pytest.mark.usefixtures("by_kernels")
def test_parts_of_a_vocabulary_add_up(monkeypatch):
    """Two ranks, one after the other: what each finds is joined by the numbers that they send."""
    asked = WantedNumbers(temperatures=(0.7,), limit=1 << 20, entropy=True)
    raw = torch.randn(9, 150, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([0, 79, 80, 149, 5, 100, 33, 81, 60])
    whole = Projection(size=150)
    expected = shares.token_numbers([rows.numbers_by_row(raw, tokens, asked, whole)], asked, whole)
    halves = [(0, 80), (80, 150)]
    found = [
        rows.numbers_by_row(raw[:, a:b], tokens, asked, Projection(size=150, start=a))
        for a, b in halves
    ]
    greatest = torch.stack([one.greatest for one in found]).amax(0)
    shares_of = [(one.greatest - greatest) for one in found]
    total = sum(less.exp() * one.total for less, one in zip(shares_of, found, strict=True))
    surprise = sum(
        less.exp() * (one.surprise + less * one.total)
        for less, one in zip(shares_of, found, strict=True)
    )
    own = sum(one.own for one in found)
    assert torch.allclose(expected.log_probs, own - greatest - total.log(), atol=1e-5)
    assert torch.allclose(expected.entropy, total.log() - surprise / total, atol=1e-5)
    pulls = rows.RowPulls(
        level=greatest + total.log(),
        entropy=expected.entropy,
        on_log_prob=torch.linspace(1, 2, 9),
        on_entropy=torch.linspace(-1, 1, 9),
    )
    at_once = rows.pull_rows(raw.clone(), tokens, pulls, asked, whole)
    parts = [
        rows.pull_rows(raw[:, a:b], tokens, pulls, asked, Projection(size=150, start=a))
        for a, b in halves
    ]
    assert torch.allclose(at_once, torch.cat(parts, 1), atol=1e-6)


COMPILING = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rlflow.engines.hf.forward.head_kernel import kernels

for kernel, third in ((kernels.distribution, "found"), (kernels.pulled, "given")):
    pointers = {"raw": "*bf16", "tokens": "*i64", third: "*fp32", "count": "i32", "start": "i32"}
    numbers = dict.fromkeys(("scale", "cap", "coldness"), "fp32")
    chosen = {"SIZE": 151_936, "CAPPED": True, "ENTROPY": True, "BLOCK": kernels.BLOCK}
    source = ASTSource(
        fn=kernel, signature={**pointers, **numbers, **dict.fromkeys(chosen, "constexpr")},
        constexprs=chosen,
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
    print(kernel.__name__, len(made.asm["cubin"]) > 0, made.asm["ptx"].count("st.local"))
"""


@interpreted
def test_they_compile_for_an_h100_and_spill_nothing():
    """What an interpreter takes a compiler may refuse; that needs no GPU."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING]
    with tempfile.TemporaryDirectory() as cache:
        kept = {**without, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=kept
        )
    assert "distribution True 0\npulled True 0\n" == done.stdout, done.stderr


@pytest.mark.parametrize(
    ("how", "fits"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"dtype": torch.float64}, False),
        ({"biased": True}, False),
        ({"chosen": True}, False),
        ({"asked": {"temperatures": (1.0, 0.7)}}, False),
        ({"asked": {"squared": True}}, False),
        ({"asked": {"rest": True}}, False),
        ({"asked": {"top_k": 4}}, False),
        ({"triton": False}, False),
    ],
)
def test_what_the_kernels_are_for(how, fits, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(rows, "compiles_kernels", lambda: how.get("triton", True))
    wanted = {"temperatures": (0.7,), "limit": 1 << 20, "entropy": True, **how.get("asked", {})}
    with FakeTensorMode():
        hidden = torch.empty(
            2, 8, device=how.get("device", "cuda"), dtype=how.get("dtype", torch.bfloat16)
        )
        found = kernels_fit(
            hidden,
            WantedNumbers(**wanted),
            chosen=how.get("chosen", False),
            biased=how.get("biased", False),
        )
    assert fits is found
