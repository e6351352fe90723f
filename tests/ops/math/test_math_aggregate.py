"""Aggregation: each mode by hand, totals of zero, padding and empty rows."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.ops.math.aggregate import Totals, aggregate, count

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
BY_HAND = {
    "token-mean": 10 / 4,
    "token-sum": 10.0,
    "seq-mean-token-sum": 10 / 3,
    "seq-mean-token-mean": (2 + 4) / 3,
    "seq-mean-token-sum-norm": 10 / 3 / 5,
}
WEIGHTS = {
    "token-mean": [1 / 4, 1 / 4],
    "token-sum": [1.0, 1.0],
    "seq-mean-token-sum": [1 / 3, 1 / 3],
    "seq-mean-token-mean": [1 / 9, 1 / 3],
    "seq-mean-token-sum-norm": [1 / 15, 1 / 15],
}
MODES = pytest.mark.parametrize("mode", BY_HAND)


def values(garbage: float = 9.0) -> torch.Tensor:
    rows = [[1.0, 2.0, 3.0], [4.0, garbage, garbage], [garbage] * 3]
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


@MODES
@pytest.mark.parametrize("garbage", [9.0, math.nan, math.inf])
def test_value_and_gradient_by_hand(mode, garbage):
    x = values(garbage)
    loss = aggregate(x, MASK, Totals(tokens=4, rows=3), mode=mode, constant=5.0)
    loss.backward()
    assert pytest.approx(BY_HAND[mode], rel=1e-14) == loss.item()
    first, second = WEIGHTS[mode]
    expected = torch.tensor([[first] * 3, [second, 0, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=0)


def test_count_counts_empty_rows():
    assert Totals(tokens=4, rows=3) == count(MASK)
    assert count(MASK) == count(MASK[:1]) + count(MASK[1:])


@MODES
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_an_empty_step_is_zero_with_zero_gradient(mode, shape):
    x = torch.full(shape, math.nan, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    loss = aggregate(x, mask, count(mask), mode=mode, constant=5.0)
    loss.backward()
    assert 0.0 == loss.item()
    assert not x.grad.any()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="seq-mean"):
        aggregate(values(), MASK, count(MASK), mode="seq-mean")
