"""Attention without masks: merged parts against masked squares, and torch's kernel."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlflow.batch import prompt_groups
from rlflow.engines.hf import checking
from rlflow.engines.hf.forward import ahead, sequences
from rlflow.engines.hf.forward.attention import PackedAttention, Traits
from rlflow.engines.hf.forward.packed import pack, pack_prompts
from rlflow.engines.hf.forward.sequences import (
    FlashSequences,
    PlainSequences,
    Sequences,
    Visible,
    flash_fits,
    kernel_options,
    kernel_parameters,
)
from rlflow.engines.hf.forward.spans import MergedAttention
from tests.engines.examples import engine, gradients, rows, worst
from tests.engines.test_head_chunks import Largest

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8
KINDS = ("log_probs", "entropy")


def layouts(batch):
    """The same rows with masks and without."""
    given = batch["prompt_tokens"], batch["response_tokens"]
    return pack(*given, CPU, 0), pack(*given, CPU, dense=False)


def parts(tokens, dtype=torch.float64, device="cpu"):
    torch.manual_seed(3)
    shapes = ((tokens, HEADS, SIZE), (tokens, KV_HEADS, SIZE), (tokens, KV_HEADS, SIZE))
    return [torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in shapes]


def same_tokens(dense, sparse, batch):
    """For each token of the layout with masks, its place in the other: by row and position."""
    found = [dict(path_tokens(layout, batch)) for layout in (dense, sparse)]
    where = {place: key for key, place in found[0].items()}
    return torch.tensor([found[1][where[place]] for place in range(dense.real)])


def path_tokens(layout, batch):
    """Pairs of what a token is, and its flat place: its prompt and row, and its position."""
    groups = prompt_groups(batch["prompt_tokens"])
    targets = layout.targets[: layout.predictions].tolist()
    firsts = iter(targets)
    for row, response in enumerate(batch["response_tokens"].unbind()):
        for token in range(len(response)):
            place = next(firsts)
            if token:
                yield (row, token), place
            else:
                size = len(batch["prompt_tokens"].unbind()[row])
                for back in range(size):
                    yield ("prompt", groups[row], size - back), place - back


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
def test_merged_parts_are_attention_with_masks(window, softcap, sunk):
    """Outputs and all gradients in float64; groups of unlike rows, empty ones and single tokens."""
    batch = rows(prompt_sizes=(5, 3, 7, 1), n=5)
    dense, sparse = layouts(batch)
    assert dense.real == sparse.real
    assert not sparse.blocks
    places = same_tokens(dense, sparse, batch)
    sinks = torch.randn(HEADS, dtype=torch.float64).requires_grad_() if sunk else None
    traits = Traits(scaling=0.7, softcap=softcap, window=window, sinks=sinks)
    inputs = parts(sparse.real)
    weight = torch.randn(sparse.real, HEADS, SIZE, dtype=torch.float64)

    found = PackedAttention(sparse).attend(0, *inputs, traits)
    filled = [
        torch.cat([x[places], x.new_zeros(len(dense.tokens) - dense.real, *x.shape[1:])])
        for x in inputs
    ]
    expected = PackedAttention(dense).attend(0, *filled, traits)[: dense.real]

    assert torch.allclose(expected, found[places], atol=1e-12)
    given = [*inputs, sinks] if sunk else inputs
    mine = torch.autograd.grad((found * weight).sum(), given)
    theirs = torch.autograd.grad((expected * weight[places]).sum(), given)
    for name, one, other in zip(("q", "k", "v", "sinks"), mine, theirs, strict=False):
        assert torch.allclose(one, other, atol=1e-11), name


@pytest.mark.parametrize("at_once", [1, 64, 1 << 24])
def test_blocks_of_queries_change_nothing(at_once, monkeypatch):
    batch = rows()
    _, sparse = layouts(batch)
    inputs = parts(sparse.real)
    traits = Traits(scaling=0.7, window=4, softcap=3.0)
    whole = PackedAttention(sparse).attend(0, *inputs, traits)
    monkeypatch.setattr(sequences, "SCORES_AT_ONCE", at_once)
    cut = PackedAttention(sparse).attend(0, *inputs, traits)

    assert torch.allclose(whole, cut, atol=1e-13)
    one, other = (torch.autograd.grad(x.cos().sum(), inputs) for x in (whole, cut))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(one, other, strict=True))


def test_bfloat16_agrees_with_float64_to_its_precision():
    """Parts are rounded before they are merged: two units in the last of 8 bits."""
    _, sparse = layouts(rows(prompt_sizes=(40, 9), n=4, response_sizes=(30, 1, 12, 21)))
    low = [x.detach().bfloat16().requires_grad_() for x in parts(sparse.real)]
    exact = [x.detach().double().requires_grad_() for x in low]
    made = [PackedAttention(sparse).attend(0, *x, Traits(scaling=0.35)) for x in (low, exact)]

    assert made[0].dtype == torch.bfloat16
    assert (made[0] - made[1]).abs().max() <= 2**-7 * made[1].abs().max()
    grads = [
        torch.autograd.grad(x.double().sin().sum(), inputs)
        for x, inputs in zip(made, (low, exact), strict=True)
    ]
    for one, other in zip(*grads, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


@pytest.fixture
def without_masks(monkeypatch):
    """Models on this CPU are computed as they are on an accelerator."""
    for module in (ahead, checking):
        monkeypatch.setattr(module, "pack", partial(pack, dense=False))
    monkeypatch.setattr(checking, "pack_prompts", partial(pack_prompts, dense=False))


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize(
    ("family", "dtype", "limit"),
    [
        ("qwen2", torch.float64, 1e-9),
        ("qwen3", torch.float64, 1e-9),
        ("mistral", torch.float64, 1e-9),
        ("gemma2", torch.float64, 1e-5),
        ("gptoss", torch.float32, 1e-3),
    ],
)
def test_a_model_computes_the_same_without_masks(family, dtype, limit, model_dir, request):
    """Windows, soft caps, sinks, grouped heads; loading compares with the plain forward too."""
    batch = rows()
    expected = engine(model_dir(family), 40, dtype)
    outputs = expected.forward(batch, outputs=KINDS, temperature=0.7)
    theirs = gradients(expected, batch, KINDS, 0.7)
    request.getfixturevalue("without_masks")
    found = engine(model_dir(family), 40, dtype)

    made = found.forward(batch, outputs=KINDS, temperature=0.7)
    for name in KINDS:
        assert torch.allclose(outputs[name], made[name], atol=limit), name
    assert worst(theirs, gradients(found, batch, KINDS, 0.7)) < 10 * limit


class Recorded:
    """Torch's kernel; what it was given is kept."""

    def __init__(self):
        self.calls = []
        self.way = FlashSequences()

    def forward(self, q, k, v, runs, seen):
        self.calls.append((len(q), len(k), runs.longest_q, runs.longest_k, seen.causal))
        return self.way.forward(q, k, v, runs, seen)

    def backward(self, *args):
        return self.way.backward(*args)


def on_meta(layout):
    """A layout's runs on a device that computes nothing but shapes and dtypes."""
    spans, meta = layout.spans, torch.device("meta")
    own, prefixes = (
        sequences.sequences(np.diff(runs.q_bounds), np.diff(runs.k_bounds), meta)
        for runs in (spans.own, spans.prefixes)
    )
    moved = replace(spans, own=own, prefixes=prefixes, device=meta, windows={})
    return replace(layout, spans=moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 4])
def test_torchs_kernel_takes_queries_keys_and_bounds(dtype, window):
    """The real operators, forward and backward, on fake tensors of a CUDA device."""
    if window is not None and "window_size" not in kernel_parameters():
        pytest.skip("this torch's kernel knows no window")
    bounds = np.array([0, 5, 12])
    with FakeTensorMode():
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        runs = Sequences(q_bounds=bounds, k_bounds=2 * bounds, q_starts=starts, k_starts=starts)
        q = torch.empty(12, HEADS, SIZE, dtype=dtype, device="cuda")
        k = torch.empty(24, KV_HEADS, SIZE, dtype=dtype, device="cuda")
        own = Visible(scale=0.5, causal=True, window=window)
        assert flash_fits(q, k, own)
        assert not flash_fits(q, k, replace(own, softcap=3.0))
        assert not flash_fits(q.float(), k.float(), own)
        for seen in (
            own,
            Visible(scale=0.5, causal=False),
        ):
            output, sums = FlashSequences().forward(q, k, k, runs, seen)
            assert (output.shape, output.dtype, output.device.type) == (q.shape, dtype, "cuda")
            assert (sums.shape, sums.dtype) == ((HEADS, 12), torch.float32)
            grads = FlashSequences().backward(output, q, k, k, output, sums, runs, seen)
            assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, k)]
    assert not flash_fits(torch.empty(4, 2, 8, dtype=torch.bfloat16), k, own)


def test_with_rocm_the_kernel_is_not_used(monkeypatch):
    with FakeTensorMode():
        q = torch.empty(12, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        assert flash_fits(q, q, Visible(scale=0.5, causal=True))
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert not flash_fits(q, q, Visible(scale=0.5, causal=True))


def test_the_kernel_is_told_what_its_version_knows():
    """By its parameters: later ones say causal by the window, and ask for grouped heads by name."""
    own, rows_in_prompt = Visible(scale=0.5, causal=True), Visible(scale=0.5, causal=False)
    near = replace(own, window=8)
    later = frozenset({"return_aux", "scale", "window_size", "enable_gqa"})
    windows = [kernel_options(x, later, grouped=True)["window_size"] for x in
               (own, rows_in_prompt, near)]  # fmt: skip
    assert [(-1, 0), (-1, -1), (7, 0)] == windows
    assert {"return_aux", "scale", "window_size", "enable_gqa"} == set(
        kernel_options(own, later, grouped=True)
    )
    early = frozenset({"query", "is_causal", "return_aux", "scale"})
    told = kernel_options(own, early, grouped=True)
    assert {"is_causal": True, "scale": 0.5} == {n: told[n] for n in told if n != "return_aux"}
    assert kernel_parameters() >= {"return_aux", "scale"}
    assert kernel_parameters() & {"window_size", "is_causal"}


def test_a_window_that_the_kernel_does_not_know_is_computed_plainly(monkeypatch):
    early = frozenset({"is_causal", "return_aux", "scale"})
    monkeypatch.setattr(sequences, "kernel_parameters", lambda: early)
    with FakeTensorMode():
        q = torch.empty(12, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        assert flash_fits(q, q, Visible(scale=0.5, causal=True))
        assert not flash_fits(q, q, Visible(scale=0.5, causal=True, window=4))


@pytest.mark.parametrize("window", [None, 4])
def test_a_prompt_is_attended_to_once_for_its_group(window):
    """What the kernel is asked: all runs by themselves, then groups on prompts; or with windows."""
    _, layout = layouts(rows(prompt_sizes=(5, 3), n=3))
    spans = on_meta(layout).spans
    q, k, v = (x.to("meta", torch.bfloat16).requires_grad_() for x in parts(layout.real))
    way = Recorded()
    output = MergedAttention.apply(
        q, k, v, None, spans, Visible(scale=0.5, causal=True, window=window), way
    )
    grads = torch.autograd.grad(output, (q, k, v), output)

    assert [x.shape for x in (output, *grads)] == [x.shape for x in (q, q, k, v)]
    longest = spans.own.longest_q
    if window is None:
        group = int(np.diff(spans.prefixes.q_bounds).max())
        assert way.calls == [
            (layout.real, layout.real, longest, longest, True),
            (layout.real - spans.prompts, 8, group, 5, False),
        ]
    else:
        runs, index = spans.within(window)
        assert [(layout.real, len(index), longest, runs.longest_k, True)] == way.calls
        assert len(index) == layout.real + 3 * sum(spans.prefix_length > 0)


@pytest.mark.parametrize("window", [None, 64])
def test_no_mask_is_made_for_a_device(window, monkeypatch):
    """Nothing as large as tokens times tokens, in laying out or attending; masks are."""
    batch = rows(prompt_sizes=(300,), n=4, response_sizes=(200, 200, 150, 180))
    given = batch["prompt_tokens"], batch["response_tokens"]
    made = []
    for dense in (True, False):
        tracemalloc.start()
        layout = pack(*given, CPU, dense=dense)
        made.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    tokens = layout.real
    assert made[0] > 4 * 200 * 300 > 150 * tokens > made[1]
    monkeypatch.setattr("rlflow.engines.hf.forward.spans.attends_by", lambda *_: "varlen")
    q, k, v = (
        torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (HEADS, 1, 1)
    )
    with Largest() as counted:
        state = PackedAttention(on_meta(layout))
        output = state.attend(0, q, k, v, Traits(scaling=0.1, window=window))
        output.backward(torch.empty_like(output))
    assert tokens * HEADS * 64 == counted.numbers < tokens * tokens


def test_prompts_alone_lie_as_they_do_with_masks():
    prompts = rows()["prompt_tokens"]
    dense, sparse = pack_prompts(prompts, CPU), pack_prompts(prompts, CPU, dense=False)

    assert torch.equal(dense.tokens[: dense.real], sparse.tokens)
    assert torch.equal(dense.targets[: dense.predictions], sparse.targets)
    assert sparse.spans.prefixes is None
    assert sparse.spans.prompts == sparse.real


def test_a_key_that_no_query_of_a_block_sees_changes_nothing():
    """Windows shorter than a block's distance to its first key leave whole columns hidden."""
    q, k, v = (x.detach() for x in parts(40))
    runs = sequences.sequences(np.array([40]), np.array([40]), CPU)
    seen = Visible(scale=0.5, causal=True, window=2)
    output, sums = PlainSequences().forward(q, k, v, runs, seen)
    again, _ = PlainSequences().forward(
        q[-2:], k[-3:], v[-3:], sequences.sequences(np.array([2]), np.array([3]), CPU), seen
    )

    assert torch.allclose(output[-2:], again, atol=1e-12)
    assert torch.isfinite(sums).all()
