"""Samples of a prompt that begin alike are computed once, in training and in generation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.forward import kernels
from rlflow.engines.hf.forward.packed import pack
from rlflow.engines.hf.forward.prefixes import prefixes
from rlflow.engines.hf.generate.cache import KeyValueCache
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from tests.engines.examples import engine, gradients, plain_log_probs, plain_model, weighted, worst

pytestmark = pytest.mark.torch

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=9)
CPU = torch.device("cpu")


@given(rows=ROWS, groups=st.integers(1, 3))
def test_a_row_s_path_has_its_tokens_and_each_beginning_stands_once(rows, groups):
    group = np.arange(len(rows)) % groups
    length = np.array([len(row) for row in rows])
    values = np.array([token for row in rows for token in row], dtype=np.int64)
    start = np.cumsum(length) - length
    tree = prefixes(group, length, start, values)
    own = length[tree.order] - tree.shared
    own_start = np.cumsum(own) - own
    path = tree.path(own_start, length[tree.order])

    places, begin = {}, 0
    for number in tree.order:
        here = path[begin : begin + length[number]].tolist()
        begin += length[number]
        for depth, place in enumerate(here):
            beginning = (group[number], tuple(rows[number][: depth + 1]))
            assert places.setdefault(beginning, place) == place
    assert sorted(places.values()) == list(range(int(own.sum())))


@given(
    responses=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=2, max_size=8)
)
def test_a_token_sees_its_prompt_and_what_came_before_it(responses):
    prompts = [[7, 8] if row % 2 else [5] for row in range(len(responses))]
    layout = pack(ragged_rows(prompts, torch.int64), ragged_rows(responses, torch.int64), CPU)
    (block,) = layout.blocks
    slots = torch.arange(layout.real) if layout.slots is None else layout.slots[: layout.real]
    flat_at = {int(slot): token for token, slot in enumerate(slots)}
    row = at = 0
    for row, response in enumerate(responses):
        for token in range(len(response)):
            # The place that predicts a token sees the tokens before it in their order, and no more.
            place = int(slots[layout.targets[at + token]])
            number, query = divmod(place, block.q_len)
            seen = [
                int(layout.tokens[flat_at[number * block.q_len + key]])
                for key in block.mask[number, query].nonzero()[:, 0].tolist()
            ]
            assert [*prompts[row], *response[:token]] == seen
        at += len(response)
    assert at == layout.predictions


def test_gradients_of_rows_that_begin_alike_equal_those_of_padded_rows(model_dir, exact_softmax):
    prompts = [[3, 1, 4]] * 5 + [[2, 7]] * 2
    responses = [[5, 6, 7], [5, 6], [5, 6, 7], [9], [5, 8, 7], [5, 6], [5, 6]]
    from rlflow.batch import make_batch

    fields = {"prompt_tokens": prompts, "response_tokens": responses}
    batch = make_batch({name: ragged_rows(of, torch.int64) for name, of in fields.items()}, 7)
    plain = plain_model(model_dir("qwen2"))
    expected = plain_log_probs(plain, batch)
    weighted(batch)({"log_probs": expected}, batch)[0].backward()
    ours = engine(model_dir("qwen2"))
    assert 3 + 2 + 3 + 1 == pack(batch["prompt_tokens"], batch["response_tokens"], CPU).real
    found = ours.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
    assert torch.allclose(expected, found, rtol=1e-10, atol=1e-10)
    grads = gradients(ours, batch)
    assert worst({name: p.grad for name, p in plain.named_parameters()}, grads) < 1e-10


@given(parents=st.lists(st.integers(0, 4), min_size=1, max_size=15))
def test_a_branch_goes_on_with_what_its_parent_has_seen(parents):
    sizes = torch.tensor([2, 3, 1, 3, 2])
    cache = KeyValueCache(sizes, 1, 2, CPU, 3)
    cache.buffers = {0: (torch.rand(15, 2, cache.columns, 4), torch.rand(15, 2, cache.columns, 4))}
    before = [buffer.clone() for buffer in cache.buffers[0]]
    chosen = torch.tensor(sorted(parents))
    places = cache.branch(chosen)

    assert sorted(places.tolist()) == list(range(len(parents)))
    assert len(parents) <= cache.rows <= 15
    assert torch.equal(sizes[chosen], cache.lengths[places])
    seen = cache.column + 1
    for old, new in zip(before, cache.buffers[0], strict=True):
        assert torch.equal(old[chosen, :, :seen], new[places, :, :seen])


@pytest.mark.parametrize("stops", [(), tuple(range(12))])
def test_samples_are_those_of_prompts_that_are_drawn_alone(stops, model_dir):
    rollout = TorchRollout(load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu"))
    prompts, ids = [[3, 1, 4], [9, 2]], torch.arange(32)
    key = SampleKey(seed=3, iteration=1, stream="rollout")
    asked = Sampling(max_new_tokens=9, n=16, temperature=0.5, stop_tokens=stops)
    alone = Sampling(max_new_tokens=9, n=1, temperature=0.5, stop_tokens=stops)
    repeated = ragged_rows([row for row in prompts for _ in range(16)], torch.int64)
    together = rollout.generate(ragged_rows(prompts, torch.int64), asked, key, ids)
    each = rollout.generate(repeated, alone, key, ids)

    for field in ("response_tokens", "log_probs"):
        pairs = zip(getattr(together, field).unbind(), getattr(each, field).unbind(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_few_rows_are_decoded_while_samples_are_alike(model_dir, monkeypatch):
    rollout = TorchRollout(load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu"))
    forward, rows = rollout.model.logits, []

    def counted(tokens, *args):
        rows.append(len(tokens))
        return forward(tokens, *args)

    monkeypatch.setattr(rollout.model, "logits", counted)
    greedy = Sampling(max_new_tokens=4, n=24, temperature=0.0)
    key = SampleKey(seed=3, iteration=1, stream="rollout")
    rollout.generate(ragged_rows([[3, 1, 4]], torch.int64), greedy, key, torch.arange(24))

    assert [8, 8, 8] == rows[1:]


@pytest.mark.parametrize("size", [(8, 5), (32, 64), (1024, 256)])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(size):
    wide, out = size
    x, weight = torch.rand(64, wide) - 0.5, torch.rand(out, wide) - 0.5
    whole = kernels.product(x, weight)

    for rows in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 48):
        assert torch.equal(whole[:rows], kernels.product(x[:rows].clone(), weight))
        assert torch.equal(whole[-rows:], kernels.product(x[-rows:].clone(), weight))
