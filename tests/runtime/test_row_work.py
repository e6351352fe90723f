"""Operations of a model's products, by hand: of rows as they are packed, forward and backward."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import ragged_rows
from rlflow.runtime.record.devices.rows import row_work
from rlflow.scheduler.models.flops import ProductSizes, product_sizes
from rlflow.scheduler.models.shapes import known_shape

pytestmark = pytest.mark.torch


def rows(*lists):
    return ragged_rows(lists, torch.int64)


def test_equal_prompts_are_computed_once_and_each_response_attends_to_its_own():
    """Two rows of the prompt 1 2 3 with 2 and 1 tokens, one of the prompt 4 with 4.

    Pairs: prompts 3 * 4 / 2 + 1; responses 2 * 3 + 3, 1 * 3 + 1, 4 * 1 + 10.
    """
    found = row_work(
        {
            "prompt_tokens": rows([1, 2, 3], [1, 2, 3], [4]),
            "response_tokens": rows([7, 8], [9], [7, 7, 7, 7]),
        }
    )

    assert {"tokens": 14.0, "passed": 11.0, "predicted": 7.0, "pairs": 7 + 9 + 4 + 14.0} == found


def test_a_row_alone_has_half_of_the_square_of_its_tokens():
    found = row_work({"response_tokens": rows([1] * 10)})

    assert (10.0, 10 * 11 / 2) == (found["passed"], found["pairs"])
    assert {} == row_work({"reward": torch.zeros(3)})


def test_a_forward_by_hand():
    sizes = ProductSizes(body=1000, head=50, layers=2, heads=3, head_dim=4)

    assert 2 * 1000 * 11 + 2 * 50 * 7 + 4 * 2 * 3 * 4 * 34 == sizes.forward(11, 7, 34)


def test_a_7b_model_takes_what_palm_counts_for_it_less_half_of_the_square():
    """Of whole rows of 4096 tokens PaLM counts 6 N + 12 L H Q T a token, N without the lookup."""
    shape = known_shape("qwen2.5-7b")
    sizes = product_sizes(shape, predicts=True)
    tokens = 4096
    parameters = shape.parameters - shape.vocab * shape.hidden
    palm = 6 * parameters + 12 * shape.layers * shape.heads * shape.head_dim * tokens

    ours = 3 * sizes.forward(tokens, tokens, tokens * (tokens + 1) / 2) / tokens

    assert (28, 28, 128) == (shape.layers, shape.heads, shape.head_dim)
    causal = 6 * shape.layers * shape.heads * shape.head_dim * (tokens - 1)
    assert palm - causal == pytest.approx(ours, rel=1e-12)
    assert 0.05 < causal / ours < 0.07, "of a row of 4096 tokens attention is some 6 %"


def test_a_value_model_has_no_head_over_the_vocabulary():
    shape = known_shape("qwen2.5-0.5b")

    assert 0 == product_sizes(shape, predicts=False).head
    assert 151936 * 896 == product_sizes(shape, predicts=True).head
    tied = product_sizes(shape, predicts=True)
    assert shape.parameters == tied.body + tied.head, "the embedding is the head"
