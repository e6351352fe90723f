"""One forward for several temperatures, and a base model without a copy of its own."""

from __future__ import annotations

import pytest
import torch

import rlflow as rf
from rlflow.batch import make_batch, ragged_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from tests.engines import sharded_bases
from tests.engines.examples import engine, one_step, rows

pytestmark = pytest.mark.torch

LORA = rf.LoRA(rank=3, alpha=6, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
SHAPES = [
    pytest.param((1, 2, 1), id="fsdp2"),
    pytest.param((1, 1, 2), id="tp2"),
    pytest.param((2, 1, 1), id="dp2"),
]


@pytest.mark.parametrize("micro_tokens", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_column_has_the_bits_of_a_forward_at_its_temperature(dtype, micro_tokens, model_dir):
    made = load_model(model_dir("qwen2"), dtype=dtype, device="cpu")
    ours, given = TrainEngine(made, None, micro_tokens=micro_tokens), (1.0, 0.5, 2.0)
    outputs = ("log_probs", "entropy")

    found = ours.forward(rows(), outputs=outputs, temperature=given)

    for column, temperature in enumerate(given):
        expected = ours.forward(rows(), outputs=outputs, temperature=temperature)
        for name in outputs:
            assert torch.equal(expected[name], found[name][:, column])
    assert not torch.equal(found["log_probs"][:, 0], found["log_probs"][:, 1])


def test_no_response_token_has_a_column_for_every_temperature(model_dir):
    made = load_model(model_dir("qwen2"), dtype=torch.float32, device="cpu")
    fields = {
        "prompt_tokens": ragged_rows([[1, 2]], torch.int64),
        "response_tokens": ragged_rows([[]], torch.int64),
    }
    ours = TrainEngine(made, None, micro_tokens=None)

    found = ours.forward(make_batch(fields, 1), outputs=("log_probs",), temperature=(1.0, 0.5))

    assert (0, 2) == found["log_probs"].shape


@pytest.mark.rows(2)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_adapters_leave_the_base_as_it_was_loaded(family, dtype, model_dir):
    options = {"lora": LORA}
    ours, batch = engine(model_dir(family), dtype=dtype, options=options), rows()
    frozen = load_model(model_dir(family), dtype=dtype, device="cpu")
    theirs = TrainEngine(frozen, None, micro_tokens=None)
    for _ in range(2):
        one_step(ours, batch)

    asked = {"outputs": ("log_probs",), "temperature": 0.7}
    expected = theirs.forward(batch, **asked)["log_probs"]
    with ours.model.adapters_off():
        found = ours.forward(batch, **asked)["log_probs"]

    assert torch.equal(expected, found)
    assert not torch.equal(expected, ours.forward(batch, **asked)["log_probs"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_so_does_a_sharded_base(shape, dtype, world, model_dir):
    count = shape[0] * shape[1] * shape[2]
    args = (model_dir("qwen3"), shape, LORA, dtype)

    found = world(count).run(sharded_bases.a_base_is_the_model_it_was_loaded_from, *args)

    assert [(True, True)] * count == [tuple(pair) for pair in found]


@pytest.mark.slow
def test_ranks_keep_step_at_several_temperatures(world, model_dir):
    args = (model_dir("llama"), (1, 2, 1))

    assert all(world(2).run(sharded_bases.one_pass_serves_temperatures, *args))
