"""Ragged fields: made, padded, selected and joined without losing a value."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


@pytest.fixture
def batch():
    import torch

    from rlflow.batch import make_batch, ragged_rows, text

    tokens = ragged_rows([[1, 2, 3], [], [4], [5, 6]], torch.int64)
    fields = {"tokens": tokens, "score": torch.arange(4.0), "word": text(["a", "", "\u00e9", "cd"])}
    return make_batch(fields, 4)


def rows(batch):
    from rlflow.batch import split_rows, strings

    tokens = [part.tolist() for part in split_rows(batch["tokens"])]
    return list(zip(tokens, batch["score"].tolist(), strings(batch["word"]), strict=True))


def test_rows_come_back_as_they_were_put_in(batch):
    expected = [([1, 2, 3], 0.0, "a"), ([], 1.0, ""), ([4], 2.0, "\u00e9"), ([5, 6], 3.0, "cd")]

    assert expected == rows(batch)


def test_select_takes_any_order_and_repeats(batch):
    from rlflow.batch import select_rows

    whole = rows(batch)

    assert [whole[i] for i in (3, 0, 3, 1)] == rows(select_rows(batch, [3, 0, 3, 1]))


def test_concat_is_the_inverse_of_cutting(batch):
    from rlflow.batch import concat_rows, select_rows

    parts = [select_rows(batch, [0]), select_rows(batch, [1, 2]), select_rows(batch, [3])]

    assert rows(batch) == rows(concat_rows(parts))


def test_pad_and_unpad_are_inverses_and_carry_the_gradient():
    import torch

    from rlflow.batch import pad, unpad

    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    sizes = torch.tensor([2, 0, 1])
    padded = pad(values, sizes, fill=-1)
    (padded * torch.tensor([[2.0, 3.0], [5.0, 5.0], [7.0, 5.0]])).sum().backward()

    assert [[1.0, 2.0], [-1.0, -1.0], [3.0, -1.0]] == padded.tolist()
    assert [1.0, 2.0, 3.0] == unpad(padded, sizes).tolist()
    assert [2.0, 3.0, 7.0] == values.grad.tolist()
