"""FlexAttention: blocks of masks from bounds of runs, and one trace for all layouts, on the CPU.

On a CPU torch multiplies whole squares for it, in eager mode and with a backward that its public
function refuses there; what inductor makes of it for a GPU is of `tests/gpu`.
"""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from rlflow.batch import make_batch, ragged_rows
from rlflow.engines.hf import checking
from rlflow.engines.hf.forward import ahead, spans
from rlflow.engines.hf.forward.attention import PackedAttention, Traits
from rlflow.engines.hf.forward.flex import attention
from rlflow.engines.hf.forward.flex.block_masks import (
    BLOCK,
    LEAST_BLOCKS,
    SeenKeys,
    block_mask,
    seen_blocks,
    seen_keys,
)
from rlflow.engines.hf.forward.packed import pack, pack_prompts
from tests.budget import examples
from tests.engines.examples import engine, gradients, rows, worst

pytestmark = [
    pytest.mark.torch,
    # Torch asks every tensor that it traces, and hides the answer by other means than a filter.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

CPU, META = torch.device("cpu"), torch.device("meta")
HEADS, KV_HEADS, SIZE = 4, 2, 16


@pytest.fixture(scope="module")
def by_flex():
    """Layouts without masks attend by FlexAttention, traced and run by torch's own operators."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spans, "attends_by", lambda *_: "flex")
        patched.setattr(attention, "BACKEND", "aot_eager")
        patched.setattr(torch_flex, "_validate_device", lambda *_: None)
        yield


@st.composite
def batches(draw):
    """Groups of rows, some without a response and some longer than a block."""
    sizes = st.integers(1, 9) | st.integers(BLOCK - 2, BLOCK + 2)
    prompts, responses = [], []
    for group in range(draw(st.integers(1, 3))):
        prompt = [group] * draw(sizes)
        for _ in range(draw(st.integers(1, 3))):
            prompts.append(prompt)
            responses.append([1] * draw(st.integers(0, 9) | st.just(BLOCK + 1)))
    if not any(responses):
        responses[0] = [1, 1]
    fields = {"prompt_tokens": prompts, "response_tokens": responses}
    return make_batch({n: ragged_rows(x, torch.int64) for n, x in fields.items()}, len(prompts))


def packed(batch):
    return pack(batch["prompt_tokens"], batch["response_tokens"], CPU, dense=False)


def tensors(tokens, *heads, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(3)
    return [
        torch.randn(tokens, count, SIZE, dtype=dtype, generator=drawn).requires_grad_()
        for count in heads
    ]


def attended(layout, traits, way, monkeypatch):
    """The output, and gradients of q, k, v and sinks."""
    q, k, v, weight = tensors(layout.real, HEADS, KV_HEADS, KV_HEADS, HEADS)
    with monkeypatch.context() as patched:
        patched.setattr(spans, "attends_by", lambda *_: way)
        output = PackedAttention(layout).attend(0, q, k, v, traits)
    inputs = [q, k, v, *([traits.sinks] if traits.sinks is not None else [])]
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.slow
@given(
    batch=batches(),
    window=st.sampled_from([None, 1, 5, BLOCK, 200]),
    softcap=st.sampled_from([None, 2.0, 3.0]),
    sunk=st.booleans(),
)
@settings(max_examples=examples(40))
@pytest.mark.usefixtures("by_flex")
def test_it_computes_what_blocks_of_products_do_in_any_layout(batch, window, softcap, sunk):
    compare(batch, window, softcap, sunk)


@pytest.mark.slow
@pytest.mark.usefixtures("by_flex")
@pytest.mark.parametrize(
    ("window", "softcap", "sunk"), [(None, 2.0, True), (140, 2.0, False), (5, None, True)]
)
def test_it_computes_what_blocks_of_products_do(window, softcap, sunk):
    batch = rows(prompt_sizes=(5, 130, 1), n=4, response_sizes=(6, 0, 129, 2))
    compare(batch, window, softcap, sunk)


def compare(batch, window, softcap, sunk):
    """In float64, with gradients; those of sinks go through the log-sums."""
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_() if sunk else None
    traits = Traits(scaling=0.3, softcap=softcap, window=window, sinks=sinks)
    layout = packed(batch)
    with pytest.MonkeyPatch.context() as patched:
        expected, found = (attended(layout, traits, way, patched) for way in ("blocks", "flex"))
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def dense_mask(seen: SeenKeys):
    """Which query sees which key, bool `[tokens, tokens]`, as the docstring of `SeenKeys` says."""
    key = np.arange(len(seen.own_start))
    own = (seen.own_start[:, None] <= key) & (key <= key[:, None])
    return own | ((seen.prefix_start[:, None] <= key) & (key < seen.prefix_end[:, None]))


def keys_of(layout, window):
    runs = layout.spans
    return seen_keys(runs.start, runs.length, runs.prefix_start, runs.prefix_length, window)


def places(batch, layout):
    """For each response token the flat places of its row before and with it, in the row's order."""
    firsts = iter(layout.targets[: layout.predictions].tolist())
    for prompt, response in zip(
        batch["prompt_tokens"].unbind(), batch["response_tokens"].unbind(), strict=True
    ):
        path = []
        for token in range(len(response)):
            place = next(firsts)
            start = place - len(prompt) + 1
            path = [*path, place] if token else list(range(start, place + 1))
            yield path


@given(batch=batches(), window=st.sampled_from([None, 1, 5, 200]))
def test_a_token_sees_its_row_up_to_itself_within_the_window(batch, window):
    layout = packed(batch)
    mask = dense_mask(keys_of(layout, window))
    for path in places(batch, layout):
        assert np.flatnonzero(mask[path[-1]]).tolist() == sorted(path[-(window or len(path)) :])


@given(batch=batches(), window=st.sampled_from([None, 1, 5, 40]), block=st.sampled_from([4, 16]))
def test_blocks_are_those_of_the_mask(batch, window, block):
    """Nothing is seen outside of them; without a mask are those that are seen whole."""
    seen = keys_of(packed(batch), window)
    mask, blocks = dense_mask(seen), seen_blocks(seen, block)
    count = len(blocks.full)
    assert count == max(-(-len(mask) // block), LEAST_BLOCKS)
    filled = np.zeros((count * block,) * 2, dtype=bool)
    filled[: len(mask), : len(mask)] = mask
    squares = filled.reshape(count, block, count, block).transpose(0, 2, 1, 3)
    some, every = squares.any((2, 3)), squares.all((2, 3))
    assert (some == (blocks.partial | blocks.full)).all()
    # A square that a prompt's end and a run's start fill together is masked, which shows nothing.
    assert (blocks.full <= every).all()
    apart = every & ~blocks.full
    assert not apart.any() or (seen.prefix_end > seen.prefix_start).any()


def test_a_causal_row_needs_masks_on_its_diagonal_alone():
    """Four blocks of one row by hand: below the diagonal all is seen, above it nothing."""
    tokens = np.arange(4 * BLOCK)
    none = np.zeros_like(tokens)
    blocks = seen_blocks(SeenKeys(own_start=none, prefix_start=none, prefix_end=none))
    assert (blocks.partial == np.eye(4, dtype=bool)).all()
    assert (blocks.full == np.tril(np.ones((4, 4), dtype=bool), -1)).all()


def test_a_mask_is_made_without_reading_the_device_and_once_for_all_layers():
    """On a device without numbers whoever reads one fails."""
    layout = packed(rows(prompt_sizes=(300, 40), n=4, response_sizes=(200, 150)))
    made = block_mask(keys_of(layout, 64), META)
    count = -(-layout.real // BLOCK)
    assert (1, 1, count, count) == made.kv_indices.shape == made.q_indices.shape
    assert "meta" == made.kv_indices.device.type
    assert layout.spans.mask(64) is layout.spans.mask(64)
    assert layout.spans.mask(None) is not layout.spans.mask(64)


def test_a_mask_of_long_rows_takes_three_numbers_a_token_and_one_a_pair_of_blocks():
    tokens = 32_768
    length = np.array([tokens])
    none = np.zeros(1, dtype=np.int64)
    tracemalloc.start()
    made = block_mask(seen_keys(none, length, none, none, None), CPU)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pairs = (tokens // BLOCK) ** 2
    held = sum(x.numel() for x in made.as_tuple() if isinstance(x, torch.Tensor))
    assert held == 4 * pairs + 4 * tokens // BLOCK < tokens * 9
    assert most < tokens * 256 < tokens * tokens / 8


@pytest.mark.usefixtures("by_flex")
def test_layouts_windows_and_caps_share_one_trace(monkeypatch):
    """Numbers of tokens, windows, scales and caps are no constants; outputs and gradients agree.

    Where by chance there are as many blocks as heads, torch takes both for one and traces again.
    """
    traced = []

    def counted(graph, inputs):
        traced.append(graph)
        return graph

    made = torch.compile(attention.capped_scores, backend=counted, dynamic=True, fullgraph=True)
    monkeypatch.setattr(attention, "compiled", lambda *_: made)
    for prompt, window, cap in ((300, None, 2.0), (410, 9, 3.5), (150, 70, 4.0)):
        layout = packed(rows(prompt_sizes=(prompt, 20), n=2))
        traits = Traits(scaling=1 / cap, softcap=cap, window=window)
        expected, found = (attended(layout, traits, by, monkeypatch) for by in ("blocks", "flex"))
        for one, other in zip(expected, found, strict=True):
            assert torch.allclose(one, other, atol=1e-11)
    assert 1 == len(traced)


@pytest.mark.slow
@pytest.mark.usefixtures("by_flex", "exact_softmax")
@pytest.mark.parametrize(
    ("family", "dtype", "limit"),
    [("gemma2", torch.float64, 1e-5), ("gptoss", torch.float32, 1e-3)],
)
def test_a_model_computes_the_same_by_it(family, dtype, limit, model_dir, monkeypatch):
    """Soft caps and windows; windows and sinks. With recomputation it is computed again."""
    batch, kinds = rows(), ("log_probs", "entropy")
    expected = engine(model_dir(family), 40, dtype)
    outputs = expected.forward(batch, outputs=kinds, temperature=0.7)
    theirs = gradients(expected, batch, kinds, 0.7)
    for module in (ahead, checking):
        monkeypatch.setattr(module, "pack", partial(pack, dense=False))
    monkeypatch.setattr(checking, "pack_prompts", partial(pack_prompts, dense=False))
    for recompute in (False, "selective"):
        found = engine(model_dir(family), 40, dtype, options={"recompute": recompute})
        made = found.forward(batch, outputs=kinds, temperature=0.7)
        for name in kinds:
            assert torch.allclose(outputs[name], made[name], atol=limit), name
        assert worst(theirs, gradients(found, batch, kinds, 0.7)) < 10 * limit
