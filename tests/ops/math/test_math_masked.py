"""Masked statistics: hand-computed values, garbage under the mask, degenerate counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.masked import masked_whiten, select
from tests.budget import examples

pytestmark = pytest.mark.torch

GARBAGE = [math.nan, math.inf, -math.inf, 3e38]
MASK = torch.tensor([[True, True, False], [True, False, True]])


def table(garbage: float = 0.0) -> Tensor:
    """1, 3, 5 and 7 unmasked: sum 16, mean 4, variance 20 / 3."""
    return torch.tensor([[1.0, 3.0, garbage], [5.0, garbage, 7.0]], dtype=torch.float64)


def test_whiten_by_hand():
    scale = 1 / math.sqrt(20 / 3 + 1e-8)
    expected = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64) * scale
    torch.testing.assert_close(masked_whiten(table(9.0), MASK), expected, rtol=1e-14, atol=0)


def test_select_replaces_and_broadcasts():
    column = torch.tensor([[2.0], [math.nan]])
    mask = torch.tensor([[True, False], [False, False]])
    assert [[2.0, -1.0], [-1.0, -1.0]] == select(column, mask, -1.0).tolist()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_neither_value_nor_gradient(garbage):
    def run(fill: float) -> tuple[Tensor, Tensor]:
        x = table(fill).requires_grad_()
        value = masked_whiten(x, MASK)
        weights = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).reshape(value.shape)
        (value * weights).sum().backward()
        return value.detach(), x.grad

    clean, dirty = run(0.0), run(garbage)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert not dirty[1][~MASK].any()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_unmasked_gives_zero(shape):
    empty = torch.zeros(shape, dtype=torch.bool)
    assert not masked_whiten(torch.full(shape, math.nan), empty).any()


def test_a_single_entry_is_its_centred_value():
    mask = torch.tensor([[False, True]])
    assert [[0.0, 0.0]] == masked_whiten(torch.tensor([[1.0, 5.0]]), mask).tolist()


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-30, -1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_entries_whiten_to_exactly_zero(value, dtype):
    x = torch.full((1, 3), value, dtype=dtype)
    assert not masked_whiten(x, torch.ones_like(x, dtype=torch.bool)).any()


@pytest.mark.parametrize(
    ("given_dtype", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_results_are_at_least_float32(given_dtype, result):
    assert result == masked_whiten(table().to(given_dtype), MASK).dtype


@settings(deadline=None, max_examples=examples(40), derandomize=True)
@given(st.integers(2, 40), st.floats(-1e3, 1e3), st.floats(0.1, 1e3), st.integers(0, 10**6))
def test_whitened_entries_have_mean_zero_and_variance_one(count, mean, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    x = mean + spread * torch.randn(count + 3, generator=generator, dtype=torch.float64)
    mask = torch.arange(count + 3) < count
    white = masked_whiten(x, mask)[:count]
    raw = x[:count].var().item()
    assert pytest.approx(0.0, abs=1e-9) == white.mean().item()
    assert pytest.approx(raw / (raw + 1e-8), rel=1e-9) == white.var().item()


def test_the_epsilon_is_inside_the_root():
    """Entries 0 and 2e-4: variance 2e-8, so the place of the epsilon decides the result."""
    x, mask = torch.tensor([0.0, 2e-4], dtype=torch.float64), torch.tensor([True, True])
    assert pytest.approx(1e-4 / math.sqrt(3e-8), rel=1e-9) == masked_whiten(x, mask)[1].item()
