"""Masked statistics: hand-computed values, garbage under the mask, degenerate counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.masked import masked_mean, masked_sum, masked_var, masked_whiten, select

pytestmark = pytest.mark.torch

GARBAGE = [math.nan, math.inf, -math.inf, 3e38]
STATISTICS = [masked_sum, masked_mean, masked_var, masked_whiten]
MASK = torch.tensor([[True, True, False], [True, False, True]])


def table(garbage: float = 0.0) -> Tensor:
    """1, 3, 5 and 7 unmasked: sum 16, mean 4, variance 20 / 3."""
    return torch.tensor([[1.0, 3.0, garbage], [5.0, garbage, 7.0]], dtype=torch.float64)


def test_sum_mean_and_variance_by_hand():
    assert 16.0 == masked_sum(table(9.0), MASK).item()
    assert 4.0 == masked_mean(table(9.0), MASK).item()
    assert pytest.approx(20 / 3, abs=1e-15) == masked_var(table(9.0), MASK).item()


def test_whiten_by_hand():
    scale = 1 / math.sqrt(20 / 3 + 1e-8)
    expected = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64) * scale
    torch.testing.assert_close(masked_whiten(table(9.0), MASK), expected, rtol=1e-14, atol=0)


def test_select_replaces_and_broadcasts():
    column = torch.tensor([[2.0], [math.nan]])
    mask = torch.tensor([[True, False], [False, False]])
    assert [[2.0, -1.0], [-1.0, -1.0]] == select(column, mask, -1.0).tolist()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_garbage_under_the_mask_changes_neither_value_nor_gradient(statistic, garbage):
    def run(fill: float) -> tuple[Tensor, Tensor]:
        x = table(fill).requires_grad_()
        value = statistic(x, MASK)
        weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).reshape(value.shape)
        (value * weights).sum().backward()
        return value.detach(), x.grad

    clean, dirty = run(0.0), run(garbage)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert not dirty[1][~MASK].any()


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_unmasked_gives_zero(statistic, shape):
    empty = torch.zeros(shape, dtype=torch.bool)
    assert not statistic(torch.full(shape, math.nan), empty).any()


def test_a_single_entry_is_its_centred_value():
    mask = torch.tensor([[False, True]])
    assert 0.0 == masked_var(torch.tensor([[1.0, 5.0]]), mask).item()
    assert [[0.0, 0.0]] == masked_whiten(torch.tensor([[1.0, 5.0]]), mask).tolist()


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-30, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_entries_whiten_to_exactly_zero(value, dtype):
    x = torch.full((1, 3), value, dtype=dtype)
    assert not masked_whiten(x, torch.ones_like(x, dtype=torch.bool)).any()


def test_a_large_mean_costs_no_digits():
    """One pass, E[x^2] - E[x]^2, loses all of them here."""
    x = torch.tensor([1e8, 1e8 + 8, 1e8 + 16], dtype=torch.float32)
    assert 64.0 == masked_var(x, torch.ones(3, dtype=torch.bool)).item()


@pytest.mark.parametrize(
    ("given_dtype", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_results_are_at_least_float32(statistic, given_dtype, result):
    assert result == statistic(table().to(given_dtype), MASK).dtype


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(2, 40), st.floats(-1e3, 1e3), st.floats(0.1, 1e3), st.integers(0, 10**6))
def test_whitened_entries_have_mean_zero_and_variance_one(count, mean, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    x = mean + spread * torch.randn(count + 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(count + 3) < count
    white = masked_whiten(x, mask)[:count]
    raw = x[:count].var().item()
    assert pytest.approx(0.0, abs=1e-9) == white.mean().item()
    assert pytest.approx(raw / (raw + 1e-8), rel=1e-9) == white.var().item()


def check_whiten(whiten):
    """Entries 0 and 2e-4: variance 2e-8, so the place of the epsilon decides the result."""
    x, mask = torch.tensor([0.0, 2e-4], dtype=torch.float64), torch.tensor([True, True])
    expected = 1e-4 / math.sqrt(3e-8)
    assert pytest.approx(expected, rel=1e-9) == whiten(x, mask)[1].item()


def test_the_epsilon_is_inside_the_root():
    check_whiten(masked_whiten)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, mask: (x - x.mean()) / (x.std() + 1e-8),
        lambda x, mask: (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt(),
        lambda x, mask: (x.mean() - x) / (x.var() + 1e-8).sqrt(),
    ],
    ids=["epsilon outside the root", "no Bessel", "wrong sign"],
)
def test_wrong_whitening_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_whiten(wrong)
